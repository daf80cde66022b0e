"""Training with compiled parts equals training without, and compiles in the first step only."""

from dataclasses import replace

import pytest
import torch

from moefold.config.schema import Config
from moefold.data.dataset import DataRequest
from moefold.errors import ConfigError
from moefold.ops.compiled import CompiledSwiGLU
from moefold.parallel.kernels.select import select_kernels
from moefold.parallel.parallelize import parallelize
from moefold.train.batch_sharding import BatchSharder
from moefold.train.train_step import TrainingStep
from moefold.verify.distributed_run import create_groups, gather_full_tensors
from tests.slow import slow
from tests.verify.recipes import tiny

COMPILE_TIMEOUT_S = 280.0
"""Compilers of several ranks share the cores of a test machine."""
MODEL = {"layers.ffn": "dense, moe", "attention.qk_norm": {}, "ffn.moe.shared.intermediate_size": 16}


def _with_compile(cfg: Config, dtype: str = "float64") -> Config:
    return replace(cfg, run=replace(cfg.run, compile="blocks", dtype=dtype))


def _train(cfg: Config) -> tuple[list[tuple[float, float]], float, dict[str, torch.Tensor]]:
    """Return losses and norms of the steps, the loss of an evaluation, and the weights."""
    model = parallelize(cfg, create_groups(cfg))
    (block, *_) = model.stages[0].layers.values()
    assert isinstance(block.attention.kernels.swiglu, CompiledSwiGLU) == (cfg.run.compile == "blocks")
    training = TrainingStep(model, cfg)
    data = DataRequest.of(cfg).open()
    sharder = BatchSharder(data.train, cfg.batch_shape, model.groups, model.positions)
    losses = []
    stance = "default"
    for i in range(3):
        with torch.compiler.set_stance(stance):
            result = training.run(sharder.batch(i * cfg.train.global_batch_size), i + 1)
            losses.append((result.loss, result.grad_norm))
            eval_loss = training.evaluate([sharder.batch(0)])
        stance = "fail_on_recompile"
    return losses, eval_loss, gather_full_tensors(model)


CASES = [
    ({}, {}),
    ({"world_size": 2, "zero": 3}, {"recompute": ("layer",)}),
    ({}, {"recompute": ("norms", "core_attention", "dense_mlp", "moe")}),
    ({"world_size": 2, "zero": 2}, {}),
    ({"world_size": 2, "tp": 2, "ep": 2}, {}),
    ({"world_size": 2, "tp": 2, "overlap_tp": True}, {"recompute": ("shared_experts",)}),
    ({"world_size": 2, "cp": 2}, {"offload": ("dense_mlp",)}),
    ({"world_size": 2, "pp": 2, "schedule": "zero-bubble"}, {}),
]


@pytest.mark.parity
@pytest.mark.parametrize(("mapping", "train"), slow(CASES))
def test_compiled_training_equals_eager_training(pool, mapping, train):
    cfg = tiny(model=MODEL, train=train, **mapping)
    eager, compiled = (
        pool.run(cfg.parallel.world_size, _train, c, timeout_s=COMPILE_TIMEOUT_S) for c in (cfg, _with_compile(cfg))
    )
    for (losses, eval_loss, weights), (expected, expected_eval, expected_weights) in zip(compiled, eager, strict=True):
        torch.testing.assert_close(losses, expected, rtol=1e-10, atol=1e-10)
        assert eval_loss == pytest.approx(expected_eval, rel=1e-10)
        torch.testing.assert_close(weights, expected_weights, rtol=1e-8, atol=1e-10)


def test_the_log_names_the_compiled_kernels_and_other_kernels_stay():
    cfg = tiny(model=MODEL)
    cfg = replace(cfg, run=replace(cfg.run, dtype="float32", kernels="auto"))
    plain, chosen = (select_kernels(c, torch.device("cpu")) for c in (cfg, _with_compile(cfg, "float32")))
    assert "run.compile='blocks': QK norm with RoPE" in chosen.message
    assert type(chosen.norm) is type(plain.norm)


def test_a_machine_without_compiler_is_refused(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ConfigError, match=r"run.compile='blocks' cannot run: there is no C\+\+ compiler"):
        select_kernels(_with_compile(tiny(model=MODEL)), torch.device("cpu"))
