"""Blockwise FP8 kernels equal the simulated products: the same rounding, the same sums."""

import pytest
import torch

from moefold.ops.interface import GatheredRows
from moefold.ops.quantization.emulated import EmulatedExpertOps, EmulatedLinear
from moefold.ops.quantization.formats import E4M3_MAX, QuantFormat, float32_scale, round_to_e4m3
from moefold.ops.triton.fp8_gemm import Fp8ExpertOps, Fp8Linear

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BLOCK = 128 if torch.cuda.is_available() else 16
RECIPE = QuantFormat("fp8", E4M3_MAX, round_to_e4m3, BLOCK, BLOCK, float32_scale)
SIMULATED = EmulatedLinear(RECIPE)
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 8e-3}
"""Relative to the largest value: another order of the sum; of 8 bits a unit in the last, as both sides round once."""


def _random(dtype, *shape):
    """Blocks of very different size, so that one scale for all would be seen."""
    spread = torch.logspace(-3, 3, shape[-1], dtype=torch.float64)
    return (torch.randn(shape, dtype=torch.float64) * spread).to(dtype).to(DEVICE)


def _assert_close(actual, expected, dtype, summed=1):
    assert actual.dtype == dtype
    assert actual.isfinite().all()
    scale = expected.abs().max().clamp(min=1e-30) if expected.numel() else 1.0
    torch.testing.assert_close(
        actual.double() / scale, expected.double() / scale, rtol=0, atol=summed * TOLERANCE[dtype]
    )


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("counts", [[3, 0, 37, 1], [0, 16], [0, 0]], ids=str)
@pytest.mark.parametrize("gathers", [False, True])
def test_experts(counts, dtype, gathers):
    num_rows, depth, width = sum(counts), 35, 50
    offsets = torch.tensor(counts).cumsum(0).to(torch.int32).to(DEVICE)
    w = _random(dtype, len(counts), depth, width)
    source = torch.randint(-1, 9, (num_rows,), dtype=torch.int32).to(DEVICE) if gathers else None
    x, grad = (GatheredRows(_random(dtype, 9 if gathers else num_rows, size), source) for size in (depth, width))
    second = _random(dtype, num_rows, depth), _random(dtype, len(counts), width, depth).mT
    kernels, expected = Fp8ExpertOps(BLOCK), EmulatedExpertOps(SIMULATED)
    for pair in (None, second):
        # The plain twin rounds both products of a pair and then their sum, the kernel the sum alone.
        summed = 1 if pair is None else 2
        _assert_close(
            kernels.grouped_gemm(x, w, offsets, pair), expected.grouped_gemm(x, w, offsets, pair), dtype, summed
        )
    _assert_close(kernels.weight_gradient(x, grad, offsets), expected.weight_gradient(x, grad, offsets), dtype)


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
def test_linear_layers(dtype):
    x, w, grad = _random(dtype, 21, 40), _random(dtype, 33, 40), _random(dtype, 21, 33)
    kernels = Fp8Linear(Fp8ExpertOps(BLOCK))
    _assert_close(kernels.forward(x, w), SIMULATED.forward(x, w), dtype)
    _assert_close(kernels.input_gradient(grad, w), SIMULATED.input_gradient(grad, w), dtype)
    _assert_close(kernels.weight_gradient(grad, x), SIMULATED.weight_gradient(grad, x), dtype)
