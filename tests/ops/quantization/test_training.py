"""Training with few bits: under mappings that keep the blocks, near bfloat16, and refused where it cannot be."""

import math
from dataclasses import replace

import pytest
import torch

from moefold.errors import ConfigError
from moefold.ops.quantization.emulated import EmulatedExpertOps
from moefold.ops.quantization.formats import QUANT_FORMATS
from moefold.parallel.kernels.select import select_kernels
from moefold.validate.config import check_config
from moefold.verify.distributed_run import run_distributed
from tests.slow import slow
from tests.verify.recipes import tiny

SIZES = {
    "layers.ffn": "dense, moe",
    "hidden_size": 256,
    "attention.num_heads": 4,
    "attention.num_kv_heads": 4,
    "attention.head_dim": 64,
    "ffn.dense.intermediate_size": 256,
    "ffn.moe.intermediate_size": 256,
    "ffn.moe.num_experts": 4,
    "init_std": 0.05,
}
"""Cut in two, every width is still a whole number of blocks."""


def _recipe(precision: str, **parallel: object):
    cfg = tiny(model=SIZES, train={"global_batch_size": 2, "precision": precision}, **parallel)
    return replace(cfg, run=replace(cfg.run, dtype="float64"))


def _run(pool, cfg, steps=2):
    return pool.run(cfg.parallel.world_size, run_distributed, cfg, steps, timeout_s=280)


ALIKE = [
    ("fp8-blockwise", {"world_size": 2, "tp": 2, "ep": 2}),
    ("fp8-blockwise", {"world_size": 2, "tp": 2, "etp": 2}),
    ("fp8-blockwise", {"world_size": 2, "pp": 2, "schedule": "zero-bubble"}),
    ("mxfp8", {"world_size": 2, "tp": 2, "ep": 2, "dispatcher": "allgather"}),
    ("nvfp4", {"world_size": 2, "tp": 2, "etp": 2}),
]


@pytest.mark.parity
@pytest.mark.parametrize(("precision", "mapping"), [*ALIKE[2:], *slow(ALIKE[:2])])
def test_mappings_that_keep_the_blocks_equal_one_rank(pool, precision, mapping):
    """To the last digits of float64: had a block other values, whole gradients would differ in the third digit."""
    alone = _run(pool, _recipe(precision))[0]
    ranks = _run(pool, _recipe(precision, **mapping))
    assert [s.loss for s in ranks[0].steps] == pytest.approx([s.loss for s in alone.steps], rel=1e-9)
    for which in ("gradients", "weights"):
        found = {name: t for rank in ranks for name, t in getattr(rank, which).items()}
        assert set(found) == set(getattr(alone, which))
        for name, tensor in getattr(alone, which).items():
            scale = tensor.abs().max().clamp(min=1e-6)
            torch.testing.assert_close(found[name] / scale, tensor / scale, rtol=0, atol=1e-7, msg=f"{which} {name}")


@pytest.mark.parity
def test_other_mappings_round_the_gradients_of_weights_elsewhere(pool):
    """Under ep over dp an expert sums over tokens of two micro-batches at once: forward the same, gradients near."""
    alone = _run(pool, _recipe("fp8-blockwise"), 1)[0]
    ranks = _run(pool, _recipe("fp8-blockwise", world_size=2, ep=2), 1)[0]
    assert ranks.steps[0].loss == pytest.approx(alone.steps[0].loss, rel=1e-9)
    assert ranks.steps[0].grad_norm == pytest.approx(alone.steps[0].grad_norm, rel=1e-2)
    assert ranks.steps[0].grad_norm != pytest.approx(alone.steps[0].grad_norm, rel=1e-9)


@pytest.mark.parity
@pytest.mark.parametrize("precision", ["mxfp8", *slow((name,) for name in QUANT_FORMATS if name != "mxfp8")])
def test_losses_stay_near_the_losses_of_bfloat16(pool, precision):
    """Over 10 steps, and are not the same: something is rounded."""
    losses = {}
    for name in ("dtype", precision):
        cfg = _recipe(name)
        cfg = replace(cfg, run=replace(cfg.run, dtype="bfloat16"), train=replace(cfg.train, lr=1e-3))
        losses[name] = [step.loss for step in _run(pool, cfg, 10)[0].steps]
    wide, narrow = losses.values()
    assert narrow != wide
    assert all(map(math.isfinite, narrow))
    apart = [abs(b / a - 1) for a, b in zip(wide, narrow, strict=True)]
    assert sum(apart) / len(apart) < (0.03 if precision == "nvfp4" else 0.01)
    assert sum(narrow[-5:]) < sum(narrow[:5])


def test_on_a_cpu_it_is_simulated_and_says_so():
    kernels = select_kernels(_recipe("mxfp8"), torch.device("cpu"))
    assert isinstance(kernels.expert_ops, EmulatedExpertOps)
    assert kernels.linear_backend is not None
    assert "simulated" in kernels.message


def test_triton_kernels_cannot_be_asked_for_at_the_same_time():
    cfg = _recipe("fp8-blockwise")
    cfg = replace(cfg, run=replace(cfg.run, kernels="triton", dtype="bfloat16"))
    with pytest.raises(ConfigError, match=r"train.precision='fp8-blockwise'.*leave run.kernels out"):
        check_config(cfg)
