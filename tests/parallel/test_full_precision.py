"""Weights in exponents of linear attention are read in float32 on any number of ranks, as on one."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from moefold.config.schema import Config
from moefold.verify.distributed_run import run_distributed
from tests.slow import slow
from tests.verify.linear_cases import HYBRID
from tests.verify.recipes import tiny

pytestmark = pytest.mark.parity


def _weights_read(cfg: Config) -> list[Sequence[Tensor]]:
    """a_log and dt_bias of each use in the first forward pass, and their gradients."""
    from moefold.model.delta_attention import DeltaAttention

    found: list[Sequence[Tensor]] = []
    core_weights = DeltaAttention.core_weights

    def recording(self: DeltaAttention, dtype: torch.dtype) -> tuple[Tensor, ...]:
        weights = core_weights(self, dtype)
        found.append([weight.detach().clone() for weight in weights[1:]])
        return weights

    DeltaAttention.core_weights = recording
    try:
        record = run_distributed(cfg, 1)
    finally:
        DeltaAttention.core_weights = core_weights
    gradients = [grad for name, grad in record.gradients.items() if name.endswith((".a_log", ".dt_bias"))]
    return [found[0], gradients]


def _in_bfloat16(cfg: Config) -> Config:
    return replace(cfg, run=replace(cfg.run, dtype="bfloat16"))


@pytest.mark.parametrize(
    "mapping",
    [
        {"zero": 3},
        *slow([({"zero": 1},), ({"zero": 0},), ({"zero": 2, "ep": 2, "overlap_experts": True},), ({"cp": 2},)]),
    ],
)
def test_several_ranks_read_the_weights_in_exponents_as_one_does(fresh_pool, mapping):
    one, several = (
        _in_bfloat16(tiny(model=HYBRID, train={"global_batch_size": 4}, **settings))
        for settings in ({}, {"world_size": 2} | mapping)
    )
    (expected,) = fresh_pool.run(1, _weights_read, one)
    for read, gradients in fresh_pool.run(2, _weights_read, several):
        assert [weight.dtype for weight in read] == [torch.float32] * 2
        for weight, theirs in zip(read, expected[0], strict=True):
            assert torch.equal(weight, theirs)
            assert not torch.equal(weight, weight.bfloat16().float())
        for gradient, theirs in zip(gradients, expected[1], strict=bool(gradients)):
            torch.testing.assert_close(gradient, theirs, rtol=0.05, atol=1e-3 * float(theirs.abs().max()))


def _modules_that_return_views(cfg: Config) -> set[str]:
    """Modules of FSDP whose output is a view: an operation in place on it would drop the hook that gathers weights."""
    from torch.distributed.fsdp import FSDPModule
    from torch.nn.modules.module import register_module_forward_hook

    found: set[str] = set()

    def look(module: torch.nn.Module, _: object, output: object) -> None:
        if isinstance(module, FSDPModule) and isinstance(output, Tensor) and output.is_leaf is False:
            found.update([type(module).__name__] if output._base is not None else [])

    with register_module_forward_hook(look):
        run_distributed(cfg, 1)
    return found


@pytest.mark.parametrize(
    "mapping",
    [{"world_size": 2}, *slow([({"world_size": 4, "tp": 2},), ({"world_size": 4, "tp": 2, "overlap_tp": True},)])],
)
def test_no_module_of_fsdp_returns_a_view(pool, mapping):
    cfg = _in_bfloat16(tiny(model=HYBRID, zero=3, **mapping))
    assert pool.run(mapping["world_size"], _modules_that_return_views, cfg) == [set()] * mapping["world_size"]
