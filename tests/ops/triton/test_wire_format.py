"""Packed FP8 rows of the kernels have the bits of torch's operations, but for the sign of zeros."""

import pytest
import torch

from moefold.ops.quantization.formats import pack, unpack
from moefold.ops.triton.permute import TritonPermuteOps

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def _rows(dtype, num_rows, width):
    """Blocks of very different size, one full of zeros."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(num_rows, width, generator=generator) * torch.logspace(-4, 4, width)
    x[:, :128] *= torch.arange(num_rows).unsqueeze(1) % 3
    return x.to(dtype).to(DEVICE)


def _assert_same_packed(actual, expected, width):
    assert torch.equal(actual[:, width:], expected[:, width:]), "scales"
    values = (packed[:, :width].view(torch.float8_e4m3fn).float() for packed in (actual, expected))
    assert torch.equal(*values)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("num_rows", [0, 1, 21])
@pytest.mark.parametrize("width", [4, 128, 260, 384, 130])
def test_packing_and_unpacking_have_the_bits_of_torch(dtype, num_rows, width):
    x = _rows(dtype, num_rows, width)
    packed = TritonPermuteOps().pack(x)
    _assert_same_packed(packed, pack(x), width)
    unpacked = TritonPermuteOps().unpack(packed, width, dtype)
    # Triton's interpreter truncates casts to bfloat16: one unit in the last of 8 bits.
    is_truncated = dtype == torch.bfloat16 and DEVICE == "cpu"
    torch.testing.assert_close(unpacked, unpack(packed, width, dtype), rtol=2.0**-7 if is_truncated else 0.0, atol=0.0)


def test_strided_rows_and_rows_of_zero_bytes():
    x = _rows(torch.bfloat16, 9, 256)
    _assert_same_packed(TritonPermuteOps().pack(x[::2].t().contiguous().t()), pack(x[::2]), 256)
    zeros = torch.zeros(3, 256 + 8, dtype=torch.uint8, device=DEVICE)
    assert torch.equal(TritonPermuteOps().unpack(zeros, 256, torch.bfloat16), torch.zeros(3, 256).bfloat16().to(DEVICE))


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_infinity_and_nan_reach_their_block(value):
    x = _rows(torch.float32, 2, 256)
    x[1, 3] = value
    y = TritonPermuteOps().unpack(TritonPermuteOps().pack(x), 256, torch.float32)
    assert not y[1, :128].isfinite().any()
    assert y[0].isfinite().all()
    assert y[1, 128:].isfinite().all()
