"""Whole micro-batches replayed from one graph have the bits of eager ones: gradients, statistics, weights and losses.

The graphs come from `recorded_graphs`. On a CPU the host knows the counts of the experts, which a graph must not
read: shapes are padded to the capacity, or the counts are on the device, as on a GPU.
"""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from moefold.comm.groups import fake_rank
from moefold.config.schema import Config
from moefold.data.dataset import DataRequest
from moefold.launch.rank_pool import WorkerError
from moefold.model.local_param import CastCopies
from moefold.model.moe.dispatch import local
from moefold.ops.expert_ops import GatheredRows, LazyCounts
from moefold.ops.grouped_experts import GroupedExpertOps
from moefold.parallel.graphed_micro_batch import GraphedAccumulation
from moefold.parallel.graphed_modules import GraphedModule
from moefold.parallel.kernels import select
from moefold.parallel.kernels.selected import SelectedKernels
from moefold.parallel.parallel_model import ParallelModel, make_runner
from moefold.parallel.parallelize import build_sharded_stages, parallelize
from moefold.train.batch_sharding import BatchSharder
from moefold.train.train_step import TrainingStep
from moefold.verify.distributed_run import create_groups
from tests.parallel.recorded_graphs import CountedRecorders
from tests.verify.linear_cases import HYBRID
from tests.verify.recipes import LATENT, tiny

PADDED = {"capacity_factor": 1.0, "pad_to_capacity": True}


def _model(cfg: Config) -> ParallelModel:
    model = parallelize(cfg, create_groups(cfg))
    # As on a GPU: weights are cast once a step, in place.
    return replace(model, cast_copies=CastCopies(model.named_parameters.values()))


def _train(cfg: Config, model: ParallelModel) -> tuple[list[object], dict[str, Tensor]]:
    """Return the metrics of two steps with an evaluation between them, and the weights."""
    training = TrainingStep(model, cfg)
    data = DataRequest.of(cfg).open()
    sharder = BatchSharder(data.train, cfg.batch_shape, model.groups, model.positions)
    metrics: list[object] = []
    for i in range(2):
        result = training.run(sharder.batch(i * cfg.train.global_batch_size), i + 1)
        layers = tuple((layer.router_entropy, layer.aux_loss, layer.z_loss) for layer in result.moe_layers)
        metrics.append((result.loss, result.mtp_loss, result.grad_norm, result.dropped_fraction, layers))
        metrics.append(result.expert_counts.tolist())
        if i == 0:
            metrics.append(training.evaluate([sharder.batch(0)]))
    return metrics, {name: parameter.detach().clone() for name, parameter in model.named_parameters.items()}


def _assert_replayed_equals_eager(cfg: Config, keeps_counts_on_device: bool = False) -> None:
    with pytest.MonkeyPatch.context() as patch:
        if keeps_counts_on_device:
            patch.setattr(local, "as_counts", lambda counts_E, values=None: LazyCounts(counts_E, values))
            patch.setattr(select, "SelectedKernels", partial(SelectedKernels, expert_ops=_DeviceCounts()))
        expected, expected_weights = _train(cfg, _model(cfg))
        model = _model(cfg)
        recorders = CountedRecorders()
        (stage,) = model.stages
        runner = GraphedAccumulation(stage, cfg.num_micro_batches, model.groups.recorder, recorders)
        metrics, weights = _train(cfg, replace(model, runner=runner))
    assert metrics == expected
    torch.testing.assert_close(weights, expected_weights, rtol=0, atol=0)
    assert recorders.count == 1


@pytest.mark.parametrize(
    ("model", "moe", "train"),
    [
        ({"tie_embeddings": True}, {"input_jitter": 0.3}, {}),
        (LATENT | {"mtp_layers": 1}, {"aux_kind": "global_batch"}, {"recompute": ("moe", "norms")}),
        (
            {"ffn.moe.router": "sigmoid", "ffn.moe.router.expert_bias": True, "ffn.moe.shared.intermediate_size": 8},
            {"aux_kind": "last_global_batch", "weight_in_expert": True},
            {"micro_batch_size": 2, "optimizer": "muon"},
        ),
        (
            {"layers.ffn": "dense, moe"} | HYBRID,
            {"choice": "sinkhorn", "aux_kind": "sequence"},
            {"recompute": ("layer",)},
        ),
    ],
)
def test_a_replayed_micro_batch_equals_an_eager_one(pool, model, moe, train):
    pool.run(1, _assert_replayed_equals_eager, tiny(model=model, moe=PADDED | moe, train=train))


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.slow)])
def test_weights_cast_once_a_step_are_read_at_their_address(pool, dtype):
    cfg = tiny(moe=PADDED)
    pool.run(1, _assert_replayed_equals_eager, replace(cfg, run=replace(cfg.run, dtype=dtype, kernels="plain")))


class _DeviceCounts(GroupedExpertOps):
    """Grouped GEMMs that compute each row with every expert, and so never read counts: as kernels on a GPU."""

    def grouped_gemm(self, rows, w_EKN, offsets_E, second=None):
        """See base class."""
        y_RN = torch.einsum("re,rk,ekn->rn", self._one_hot(rows, offsets_E), rows.materialized, w_EKN)
        return y_RN if second is None else y_RN.add_(self.grouped_gemm(GatheredRows(second[0]), second[1], offsets_E))

    def weight_gradient(self, rows, grad, offsets_E):
        """See base class."""
        return torch.einsum("re,rk,rn->ekn", self._one_hot(rows, offsets_E), rows.materialized, grad.materialized)

    @staticmethod
    def _one_hot(rows: GatheredRows, offsets_E: Tensor) -> Tensor:
        row_R = torch.arange(rows.num_rows)
        expert_R = torch.searchsorted(offsets_E, row_R.to(offsets_E.dtype), right=True)
        return (expert_R.unsqueeze(1) == torch.arange(len(offsets_E))).to(rows.materialized.dtype)


@pytest.mark.parametrize("moe", [{}, {"capacity_factor": 0.8}])
def test_a_dropless_micro_batch_is_replayed_where_counts_stay_on_the_device(pool, moe):
    pool.run(1, _assert_replayed_equals_eager, tiny(moe=moe), True)


def test_a_count_that_the_host_reads_is_noticed(pool):
    with pytest.raises(WorkerError, match="the host reads by tolist"):
        pool.run(1, _assert_replayed_equals_eager, tiny())


@pytest.mark.parametrize(
    ("mode", "is_graphed"),
    [("none", (False, False, False)), ("attention", (True, False, False)), ("attention_router", (True, True, False)),
     ("full", (False, False, True))],
)  # fmt: skip
def test_the_recipe_chooses_the_captured_modules(mode, is_graphed):
    cfg = tiny()
    cfg = replace(cfg, run=replace(cfg.run, cuda_graphs=mode))
    with fake_rank(cfg.parallel, 0) as groups:
        sharded = build_sharded_stages(cfg, groups, for_training=True)
        runner = make_runner(sharded.stages, sharded.stage_plan, groups, cfg.run, cfg.model, cfg.parallel, cfg.train)
        inference = build_sharded_stages(cfg, groups, for_training=False)
    for stages, expected in ((sharded.stages, is_graphed[:2]), (inference.stages, (False, False))):
        for block in stages[0].layers.values():
            modules = (block.attention, block.ffn.router)
            assert tuple(isinstance(module.forward, GraphedModule) for module in modules) == expected
    assert isinstance(runner, GraphedAccumulation) == is_graphed[2]
