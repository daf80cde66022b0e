"""Which ranks reduced a gradient: every rank contributes 2**rank, so the sum spells the set. Tolerance 0."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from moefold.comm.groups import ParallelGroups
from moefold.comm.sharded_tensor import full_tensor
from moefold.config.schema import Config
from moefold.model.local_param import local_param
from moefold.parallel.gradients import sum_replicated_gradients
from moefold.parallel.parallelize import parallelize
from moefold.validate.config import check_config
from tests.verify.covering import few_else_slow
from tests.verify.recipes import tiny

pytestmark = pytest.mark.parity

MAPPINGS = [
    {"world_size": 8, "tp": 2, "cp": 2, "ep": 4},
    {"world_size": 8, "tp": 2, "ep": 2, "etp": 2, "order": "pp-tp-cp-dp"},
    {"world_size": 8, "cp": 2, "etp": 2, "moe_order": "pp-etp-ep-edp", "zero": 0},
    {"world_size": 8, "tp": 4, "pp": 2, "ep": 2, "zero": 3},
]


def _fingerprints(cfg: Config) -> dict[str, set[float]]:
    """The values in the gradient of each parameter of this rank."""
    groups = ParallelGroups.create(check_config(cfg), torch.device("cpu"))
    model = parallelize(cfg, groups)
    stage = model.stages[0]

    def every_parameter_once(*_: object) -> torch.Tensor:
        for module in stage.modules():
            if isinstance(module, FSDPModule):
                module.unshard()
        mine = 2.0 ** dist.get_rank()
        return torch.stack([local_param(p).sum() for p in stage.parameters()]).sum() * mine

    stage.forward = every_parameter_once
    stage(torch.zeros(1)).backward()
    sum_replicated_gradients(model.named_parameters, groups.attn.tp)
    return {name: set(full_tensor(p.grad).unique().tolist()) for name, p in model.named_parameters.items()}


@pytest.mark.parametrize("mapping", few_else_slow(MAPPINGS, MAPPINGS[:1]))
def test_each_gradient_is_reduced_over_exactly_its_ranks(pool, mapping):
    cfg = tiny(
        model={"ffn.moe.shared.intermediate_size": 16, "attention.qk_norm": {}},
        train={"global_batch_size": 8},
        **mapping,
    )
    layout = check_config(cfg)
    kinds = {"experts": 0, "router": 0, "wq": 0, "norm": 0, "shared": 0}
    for rank, found in enumerate(pool.run(8, _fingerprints, cfg)):
        attention, moe = layout.attention, layout.moe
        stage = [r for r in range(8) if attention.coordinate(r, "pp") == attention.coordinate(rank, "pp")]
        replicated = {_spell(stage)}
        by_tp = {_spell(attention.group(r, "dp", "cp")) for r in attention.group(rank, "tp")}
        by_expert = {_spell(moe.group(r, "edp")) for r in moe.group(rank, "ep", "etp")}
        for name, values in found.items():
            if ".experts." in name:
                expected = by_expert
            elif "norm" in name or "router" in name or (layout.tp > 2 and name.endswith(("wk", "wv"))):
                expected = replicated
            else:
                expected = by_tp
            assert values == expected, (rank, name)
            for kind in kinds:
                kinds[kind] += kind in name
    assert all(kinds.values())


def _spell(ranks: object) -> float:
    return float(sum(2**rank for rank in ranks))
