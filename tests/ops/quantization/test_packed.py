"""Rows in 8 bits are those that products of `fp8-blockwise` would make of them, in fewer bytes."""

import pytest
import torch

from moefold.config.base.part_registry import find_part
from moefold.ops.quantization.formats import (
    WIRE_QUANT_FORMAT,
    dequantize,
    fake_quantize,
    pack,
    quantize,
    straight_through_quantize,
    unpack,
)

DTYPES = [torch.float64, torch.float32, torch.bfloat16]


def _rows(num_rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows of very different sizes."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(num_rows, width, dtype=torch.float64, generator=generator)
    return (x * torch.logspace(-6, 6, num_rows, dtype=torch.float64)[:, None]).to(dtype)


@pytest.mark.parametrize("width", [6, 128, 300])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_received_rows_are_rounded_as_a_product_would(dtype, width):
    x = _rows(13, width, dtype)
    found = unpack(pack(x), width, dtype)
    assert found.dtype == dtype
    assert not torch.equal(found, x)
    assert torch.equal(found, fake_quantize(x, WIRE_QUANT_FORMAT).to(dtype))
    assert torch.equal(found, straight_through_quantize(x))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_product_rounds_no_value_again(dtype):
    """It finds the same 8 bits. Its scale is rounded like its input, in bfloat16 by up to 2**-8."""
    x = _rows(13, 256, dtype)
    values, scales = quantize(x)
    again, scales_again = quantize(dequantize(values, scales, dtype))
    assert torch.equal(again.view(torch.uint8), values.view(torch.uint8))
    bound = {torch.float64: 0.0, torch.float32: 2.0**-23, torch.bfloat16: 2.0**-8}[dtype]
    assert ((scales_again - scales).abs() <= bound * scales).all()


def test_rows_are_rounded_by_themselves():
    x = _rows(13, 300, torch.float32)
    assert torch.equal(pack(x)[4:7], pack(x[4:7]))


def test_rows_have_half_the_bytes_of_bfloat16():
    packed = pack(_rows(3, 512, torch.bfloat16))
    assert packed.dtype == torch.uint8
    assert packed.shape == (3, 512 + 4 * 4)
    assert packed.nbytes / (3 * 512) == find_part("wire", "fp8-blockwise")().value_bytes(2), "what the planner takes"


def test_every_number_of_e4m3_is_read():
    codes = torch.arange(256, dtype=torch.uint8)
    numbers = codes[codes % 128 != 127].repeat(64).view(-1, 254).view(torch.float8_e4m3fn)
    scales = torch.tensor([[1.0, 0.25]]).expand(64, 2)
    expected = numbers.to(torch.float32) * scales.repeat_interleave(128, 1)[:, :254]
    for dtype in DTYPES:
        assert torch.equal(dequantize(numbers, scales, dtype), expected.to(dtype))


def test_packing_of_any_width_equals_fake_quantization():
    for width in (5, 129, 130, 131):
        x = _rows(1, width, torch.float32)
        assert torch.equal(unpack(pack(x), width, torch.float32), fake_quantize(x, WIRE_QUANT_FORMAT))


def test_no_rows_and_rows_of_zero_bytes():
    assert unpack(pack(torch.zeros(0, 130)), 130, torch.float32).shape == (0, 130)
    assert torch.equal(unpack(pack(torch.zeros(2, 130)), 130, torch.float32), torch.zeros(2, 130))
    empty = torch.zeros(2, 138, dtype=torch.uint8)
    assert torch.equal(unpack(empty, 130, torch.bfloat16), torch.zeros(2, 130, dtype=torch.bfloat16))


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_nan_does_not_become_a_number(value):
    """Else a run that went wrong would train on."""
    x = torch.ones(2, 256)
    x[1, 130] = value
    found = unpack(pack(x), 256, torch.float32)
    assert not found[1, 130].isfinite()
    assert found[0].isfinite().all()
    assert found[1, :128].isfinite().all()


def test_the_gradient_passes_as_through_the_identity():
    x = _rows(3, 130, torch.float64).requires_grad_()
    grad = torch.randn(3, 130, dtype=torch.float64)
    (found,) = torch.autograd.grad(straight_through_quantize(x), x, grad)
    assert torch.equal(found, grad)
