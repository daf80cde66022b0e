"""`run.deterministic` would refuse no operator of a step on CUDA; tests/gpu compares runs on a GPU."""

from dataclasses import replace

import pytest
import torch

from moefold.comm.groups import ParallelGroups
from moefold.config.schema import Config
from moefold.data.dataset import DataRequest
from moefold.parallel.parallelize import parallelize
from moefold.train.batch_sharding import BatchSharder
from moefold.train.train_step import TrainingStep
from moefold.validate.config import check_config
from tests.nondeterministic_ops import NondeterministicOps
from tests.verify.recipes import LATENT, tiny

WINDOWS = {
    "attention.sinks": True,
    "layers.attention": "window, full",
    "sliding_window": 5,
    "ffn.moe.bias": True,
    "attention.qkv_bias": True,
}
BIASED = {
    "ffn.moe.router": "sigmoid",
    "ffn.moe.router.expert_bias": True,
    "ffn.moe.router.num_groups": 4,
    "ffn.moe.router.top_groups": 2,
}
FEATURES = {
    "plain": {},
    "no kernels": {"kernels": "plain"},
    "documents, windows, sinks": {"model": WINDOWS, "data": {"document_end": 2}},
    "latent attention, further tokens": {
        "model": {**LATENT, "attention.head_dim": 0, "mtp_layers": 1, "tie_embeddings": True},
        "train": {"loss_chunk": 4},
    },
    "quantiles": {
        "model": {"ffn.moe.router": "sigmoid", "ffn.moe.router.expert_bias": True},
        "moe": {"choice": "quantile"},
    },
    "dropped": {"moe": {"capacity_factor": 1.0}},
    "expert bias, padded": {
        "model": BIASED,
        "moe": {"aux_kind": "global_batch", "input_jitter": 0.01, "capacity_factor": 1.0, "pad_to_capacity": True},
    },
    "muon, recomputed": {"train": {"optimizer": "muon", "recompute": ("layer",)}},
    "fp8": {"train": {"precision": "fp8-blockwise"}},
    "all-to-all, dropped": {"parallel": {"world_size": 2, "ep": 2}, "moe": {"capacity_factor": 1.0}},
    "least loaded": {
        "parallel": {"world_size": 2, "ep": 2, "dispatcher": {"kind": "leastloaded", "min_tokens": 1}},
    },
    "context": {"parallel": {"world_size": 2, "cp": 2}, "data": {"document_end": 2}},
}


def _recipe(name: str) -> Config:
    feature = FEATURES[name]
    sections = {key: feature.get(key) for key in ("model", "moe", "train", "data")}
    cfg = tiny(**sections, **feature.get("parallel", {}))
    return replace(cfg, run=replace(cfg.run, dtype="bfloat16", kernels=feature.get("kernels", "auto")))


def _step(cfg: Config) -> set[str]:
    groups = ParallelGroups.create(check_config(cfg), torch.device("cpu"))
    model = parallelize(cfg, groups)
    training = TrainingStep(model, cfg)
    data = DataRequest.of(cfg).open()
    sharder = BatchSharder(data.train, cfg.batch_shape, groups, model.positions)
    with NondeterministicOps() as ops:
        batch = sharder.batch(0)
        training.run(batch, 1)
        training.evaluate([batch])
    return ops.found


@pytest.mark.parametrize("name", FEATURES)
def test_a_step_has_no_operator_that_raises_on_cuda(pool, name):
    cfg = _recipe(name)
    assert pool.run(cfg.parallel.world_size, _step, cfg) == [set()] * cfg.parallel.world_size


@pytest.mark.parametrize(
    ("operation", "found"),
    [
        (lambda x: x.cumsum(0), {"cumsum"}),
        (lambda x: x.long().cumsum(0), set()),
        (lambda x: x.kthvalue(2), {"kthvalue"}),
        (lambda x: torch.nn.functional.cross_entropy(x.view(2, 2), torch.tensor([0, 1])), {"nll_loss_forward"}),
        (lambda x: x.put_(torch.tensor([0]), torch.ones(1)), {"put_"}),
    ],
)
def test_operators_that_raise_are_found(operation, found):
    with NondeterministicOps() as ops:
        operation(torch.ones(4))
    assert ops.found == found
