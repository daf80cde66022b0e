"""Codes of differences against a loop over elements, and their sizes."""

import math

import pytest
import torch

from moefold.comm.wire_codes import BLOCK, Fp4Code, Int8Code, PlainCode, make_wire_code
from tests.comm.wide_range import vector

SIZES = [0, 1, 2, 255, 256, 257, 1000]


@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize("name", ["float32", "bfloat16", "int8", "fp4"])
def test_size_and_type_equal_the_formula(name, numel):
    x = vector(numel)
    code = make_wire_code(name, torch.float32)
    coded = code.encode(x)
    assert (coded.dtype, len(coded)) == (torch.uint8, code.format.num_bytes(numel))
    assert code.decode(coded, x).shape == x.shape
    bits = {"float32": 32, "bfloat16": 16, "int8": 8, "fp4": 4}[name]
    scales = 4 * math.ceil(numel / BLOCK) if bits < 16 else 0
    assert len(coded) == math.ceil(numel * bits / 8) + scales


@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_int8_and_fp4_round_each_element_to_the_nearest_level(numel, dtype):
    x = vector(numel, dtype)
    powers = [0.0, *(2.0**-k for k in range(7))]
    levels = {Int8Code: [i / 127 for i in range(-127, 128)], Fp4Code: [s * p for s in (-1, 1) for p in powers]}
    for kind, values in levels.items():
        code = kind()
        decoded = code.decode(code.encode(x), x)
        assert decoded.dtype == dtype
        for i, value in enumerate(x.tolist()):
            scale = float(x[i // BLOCK * BLOCK : (i // BLOCK + 1) * BLOCK].float().abs().max())
            nearest = min((abs(level * scale - value) for level in values), default=0.0)
            assert abs(float(decoded[i]) - value) <= nearest + 1e-6 * scale


def test_plain_codes_keep_the_bits():
    x = vector(300)
    assert torch.equal(PlainCode(torch.float32).decode(PlainCode(torch.float32).encode(x), x), x)
    double = vector(300, torch.float64)
    assert torch.equal(
        make_wire_code("float32", torch.float64).decode(
            make_wire_code("float32", torch.float64).encode(double), double
        ),
        double,
    )
    assert torch.equal(
        make_wire_code("bfloat16", torch.float32).decode(make_wire_code("bfloat16", torch.float32).encode(x), x),
        x.bfloat16().float(),
    )


@pytest.mark.parametrize("name", ["int8", "fp4"])
def test_codes_are_idempotent(name):
    """A decoded vector is coded without a further error, and signs and zeros are kept."""
    x = vector(700)
    code = make_wire_code(name, torch.float32)
    once = code.decode(code.encode(x), x)
    assert torch.equal(code.decode(code.encode(once), once), once)
    assert not once[256:512].any()
    assert bool((once * x >= 0).all())
