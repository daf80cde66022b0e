"""The estimate of FP8 against bfloat16 equals the estimate of docs/fp8.md, worked by hand."""

from dataclasses import replace

import pytest
import torch

from moefold.config.parallel import ParallelConfig
from moefold.config.train import TrainConfig
from moefold.cost.fp8_estimate import Fp8Estimate, estimate_fp8
from moefold.parallel import low_precision, select_ops
from moefold.recipe import load_config
from tests.verify.recipes import tiny


def test_small_experts_never_pay():
    estimate = Fp8Estimate("an expert", 4096, 2048, 768, (4 * 2048 + 6 * 768) / 3, 8)
    assert estimate.break_even_rows == float("inf")
    # 6 * 4096 * 2048 * 768 operations; 6 bytes for an eighth of the weights and all rows and gradients.
    assert estimate.bf16_s == pytest.approx(38.65e9 / 600e12, rel=1e-3)
    assert estimate.fp8_s == pytest.approx(38.65e9 / 700e12 + (6 * 196_608 + 3 * 17_476_267) / 3.3e12, rel=1e-3)
    assert estimate.message == (
        "by estimate 11% slower than bfloat16 in the GEMMs of an expert (4,096 rows of a micro-batch by [2048, 768]; "
        "it pays at no number of rows, see docs/fp8.md)"
    )


@pytest.mark.parametrize(("micro_batches", "rows"), [(1, 1717), (8, 215)])
def test_large_experts_pay_from_some_rows_on(micro_batches, rows):
    estimate = Fp8Estimate("an expert", rows, 6144, 16384, (4 * 6144 + 6 * 16384) / 3, micro_batches)
    assert estimate.break_even_rows == pytest.approx(rows, rel=0.005)
    for factor, is_faster in ((0.9, False), (1.1, True)):
        other = replace(estimate, rows=factor * rows)
        assert (other.fp8_s < other.bf16_s) == is_faster
        assert (" faster than bfloat16" in other.message) == is_faster


def test_rows_and_widths_are_for_one_rank():
    cfg = load_config(None, ["model.preset=mixtral-8x7b"])
    cfg = replace(
        cfg,
        parallel=ParallelConfig(world_size=8, tp=2, ep=2, etp=2),
        train=TrainConfig(seq_len=4096, micro_batch_size=2, global_batch_size=32, precision="fp8-blockwise"),
    )
    # A rank has 4,096 tokens; four ranks of an ep and etp group send two copies of each to eight experts.
    assert estimate_fp8(cfg) == Fp8Estimate("an expert", 4096.0, 4096, 7168, (4 * 4096 + 6 * 7168) / 3, 4)
    assert estimate_fp8(replace(cfg, parallel=replace(cfg.parallel, zero=3))).micro_batches == 1


def test_a_dense_model():
    cfg = tiny(model={"layer_pattern": "D"}, train={"precision": "fp8-blockwise"}, world_size=2, tp=2)
    assert estimate_fp8(cfg) == Fp8Estimate("a dense layer", 16, 16, 16, 64, 4)


def test_the_log_has_the_estimate_where_the_kernels_are_selected(monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setattr(low_precision, "fp8_unsupported_reason", lambda run, device: "")
    cfg = tiny(train={"precision": "fp8-blockwise"})
    message = select_ops.select_kernels(cfg, torch.device("cpu")).message
    assert message.startswith("train.precision='fp8-blockwise': on the tensor cores; by estimate ")
    assert "% slower than bfloat16 in the GEMMs of an expert (4 rows of a micro-batch by [16, 8]; it pays at" in message
