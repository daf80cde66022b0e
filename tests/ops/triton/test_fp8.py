"""Blockwise FP8 kernels equal the simulated products: the same rounding, the same sums."""

import pytest
import torch

from moefold.model.local_param import local_param
from moefold.ops.expert_ops import ExpertOptions, ExpertWeights, GatheredRows
from moefold.ops.quantization.emulated import EmulatedExpertOps, EmulatedLinear
from moefold.ops.quantization.formats import E4M3_MAX, QuantFormat, float32_scale, round_to_e4m3, scale_blocks
from moefold.ops.quantization.weight_cache import WeightCache
from moefold.ops.triton import fp8_gemm
from moefold.ops.triton.fp8_gemm import Fp8ExpertOps, Fp8Linear
from moefold.ops.triton.quantize import quantize_columns, quantize_rows, quantize_weights
from tests.slow import slow

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BLOCK = 128 if torch.cuda.is_available() else 16
RECIPE = QuantFormat("fp8", E4M3_MAX, round_to_e4m3, BLOCK, BLOCK, float32_scale)
SIMULATED = EmulatedLinear(RECIPE)
ACCUMULATION = 5e-3 if torch.cuda.is_available() else 0.0
"""Possible loss of a partial sum of 128 terms in the accumulators of Hopper's tensor cores, derived in docs/fp8.md."""
TOLERANCE = {torch.float32: 1e-5 + ACCUMULATION, torch.bfloat16: 8e-3 + ACCUMULATION}
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


@pytest.mark.parametrize(
    ("counts", "dtype", "gathers"),
    [
        ([3, 0, 18], torch.bfloat16, True),
        ([0, 16], torch.float32, False),
        ([0, 0], torch.bfloat16, False),
        *slow(
            [
                ([3, 0, 37, 1], torch.float32, False),
                ([3, 0, 37, 1], torch.float32, True),
                ([3, 0, 37, 1], torch.bfloat16, False),
                ([0, 16], torch.float32, True),
                ([0, 16], torch.bfloat16, False),
                ([0, 16], torch.bfloat16, True),
                ([0, 0], torch.float32, False),
                ([0, 0], torch.float32, True),
                ([0, 0], torch.bfloat16, True),
            ]
        ),
    ],
)
def test_fp8_experts_equal_simulated_products(counts, dtype, gathers):
    num_rows, depth, width = sum(counts), 35, 50
    offsets = torch.tensor(counts).cumsum(0).to(torch.int32).to(DEVICE)
    w = _random(dtype, len(counts), depth, width)
    source = torch.randint(-1, 9, (num_rows,), dtype=torch.int32).to(DEVICE) if gathers else None
    x, grad = (GatheredRows(_random(dtype, 9 if gathers else num_rows, size), source) for size in (depth, width))
    second = _random(dtype, num_rows, depth), _random(dtype, len(counts), width, depth).mT
    kernels, expected = Fp8ExpertOps(BLOCK), EmulatedExpertOps(SIMULATED)
    for pair in (None, second):
        # The plain twin rounds both products of a pair and then their sum, the kernel only the sum.
        summed = 1 if pair is None else 2
        _assert_close(
            kernels.grouped_gemm(x, w, offsets, pair), expected.grouped_gemm(x, w, offsets, pair), dtype, summed
        )
    _assert_close(kernels.weight_gradient(x, grad, offsets), expected.weight_gradient(x, grad, offsets), dtype)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_linear_layers(dtype):
    x, w, grad = _random(dtype, 21, 40), _random(dtype, 33, 40), _random(dtype, 21, 33)
    kernels = Fp8Linear(Fp8ExpertOps(BLOCK))
    _assert_close(kernels.forward(x, w), SIMULATED.forward(x, w), dtype)
    _assert_close(kernels.input_gradient(grad, w), SIMULATED.input_gradient(grad, w), dtype)
    _assert_close(kernels.weight_gradient(grad, x), SIMULATED.weight_gradient(grad, x), dtype)


def _assert_same_operand(operand, values, scales):
    """Equal bits: values of the quantised and the zero-padded part, and scales."""
    assert torch.equal(operand.values.view(torch.uint8), values.to(torch.float8_e4m3fn).view(torch.uint8))
    assert torch.equal(operand.scales, scales)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("transposes", [False, True])
def test_weights_have_the_bits_of_the_simulation(dtype, transposes):
    w = _random(dtype, 2, 35, 50)
    w = w.mT if transposes else w
    found = quantize_weights(w, BLOCK)
    for e, matrix in enumerate(w.mT):
        blocks, scale = scale_blocks(matrix, RECIPE, BLOCK)
        expected = blocks.flatten(2, 3).flatten(0, 1)[: len(matrix)]
        assert torch.equal(found.values[e].view(torch.uint8), expected.to(torch.float8_e4m3fn).view(torch.uint8))
        assert torch.equal(found.scales[e], scale[:, 0, :, 0])


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("gathers", [False, True])
def test_rows_have_the_bits_of_the_simulation(dtype, gathers):
    source = torch.tensor([4, -1, 0, 4, 8, 2, 2], dtype=torch.int32).to(DEVICE) if gathers else None
    rows = GatheredRows(_random(dtype, 9, 35), source)
    blocks, scale = scale_blocks(rows.materialized, RECIPE)
    found = quantize_rows(rows.values, rows.num_rows, source, BLOCK)
    _assert_same_operand(found, blocks.flatten(1), scale.flatten(1).t())


@pytest.mark.parametrize("counts", [[3, 0, 37, 1], [0, 0, 128, 0, 16], [5]])
def test_columns_have_the_bits_of_the_simulation(counts):
    x = _random(torch.bfloat16, sum(counts), 35)
    offsets = torch.tensor(counts).cumsum(0).to(torch.int32).to(DEVICE)
    found = quantize_columns(x, len(x), None, offsets, BLOCK)
    start = 0
    for expert, rows in enumerate(x.split(counts)):
        first = start // BLOCK + expert
        start += len(rows)
        num_blocks = -(-len(rows) // BLOCK)
        assert first + num_blocks <= start // BLOCK + expert + 1
        values = found.values[:, first * BLOCK : (first + num_blocks) * BLOCK]
        blocks, scale = scale_blocks(rows.t(), RECIPE)
        assert torch.equal(values.view(torch.uint8), blocks.flatten(1).to(torch.float8_e4m3fn).view(torch.uint8))
        assert torch.equal(found.scales[first : first + num_blocks], scale.flatten(1).t())


def test_both_layouts_of_a_weight_are_quantised_once_a_step(monkeypatch):
    calls = []
    quantize = fp8_gemm.quantize_weights
    monkeypatch.setattr(fp8_gemm, "quantize_weights", lambda w, block_size: calls.append(1) or quantize(w, block_size))
    parameter = torch.nn.Parameter(_random(torch.float32, 17, 20))
    x, grad = _random(torch.bfloat16, 5, 20), _random(torch.bfloat16, 5, 17)
    cache = WeightCache()
    kernels, uncached = Fp8Linear(Fp8ExpertOps(BLOCK, cache)), Fp8Linear(Fp8ExpertOps(BLOCK))
    for num_steps in (1, 2):
        with cache.step():
            for _ in range(2):
                w = local_param(parameter, torch.bfloat16)
                results = kernels.forward(x, w), kernels.input_gradient(grad, w)
        assert len(calls) == 4 * num_steps - 2
        expected = uncached.forward(x, w), uncached.input_gradient(grad, w)
        assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))
        parameter.data.mul_(-3.0)


@pytest.mark.parametrize("delays_wgrad", [True, *slow([(False,)])])
def test_experts_quantise_each_operand_once_in_each_layout(delays_wgrad, monkeypatch):
    """Gate and up projections share the tokens; results equal the emulation's results."""
    calls = {"quantize_rows": 0, "quantize_columns": 0}
    for name in calls:
        kernel = getattr(fp8_gemm, name)

        def counted(*arguments, name=name, kernel=kernel):
            calls[name] += 1
            return kernel(*arguments)

        monkeypatch.setattr(fp8_gemm, name, counted)
    x, grad = _random(torch.float32, 21, 20), _random(torch.float32, 21, 20) * 1e-3
    weights = ExpertWeights(*(_random(torch.float32, 2, *shape) * 1e-3 for shape in ((20, 17), (20, 17), (17, 20))))
    options = ExpertOptions([5, 16], delays_wgrad=delays_wgrad)
    results = []
    for ops in (Fp8ExpertOps(BLOCK), EmulatedExpertOps(SIMULATED)):
        y, saved = ops.forward(x, weights, options, None)
        gradients = ops.backward(grad, x, weights, options, None, saved)
        results.append([y, gradients.x, *gradients.weights()[:3]])
    for actual, expected in zip(*results, strict=True):
        _assert_close(actual, expected, torch.float32, summed=4)
    # Tokens and hidden values; gradients of outputs, gate and up. All five again for the gradients of weights.
    assert calls == {"quantize_rows": 5, "quantize_columns": 5}


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_infinity_and_nan_reach_their_row_and_its_gradient(value):
    kernels = Fp8Linear(Fp8ExpertOps(BLOCK))
    x = _random(torch.float32, 5, 2 * BLOCK)
    x[2, 3] = value
    y = kernels.forward(x, _random(torch.float32, 7, 2 * BLOCK))
    assert y[2].isnan().all()
    assert y[[0, 1, 3, 4]].isfinite().all()
    gradient = kernels.weight_gradient(_random(torch.float32, 5, 7), x)
    assert gradient[:, 3].isnan().all()
    assert gradient[:, :3].isfinite().all()
