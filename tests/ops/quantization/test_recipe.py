"""Values after rounding to few bits, by hand-worked numbers and by the bounds of the formats."""

import pytest
import torch

from moefold.ops.quantization.formats import QUANT_FORMATS, fake_quantize, round_to_e2m1, round_to_e4m3


def test_e2m1_has_eight_values_and_rounds_ties_to_even():
    """The values of the format: OCP microscaling formats, arXiv:2310.10537."""
    x = torch.tensor([0.0, 0.2, 0.25, 0.3, 0.75, 1.25, 1.75, 2.4, 2.5, 3.5, 3.6, 5.0, 5.1, -1.1])
    expected = torch.tensor([0.0, 0.0, 0.0, 0.5, 1.0, 1.0, 2.0, 2.0, 2.0, 4.0, 4.0, 4.0, 6.0, -1.0])
    assert torch.equal(round_to_e2m1(x), expected)


def test_e4m3_keeps_three_bits():
    x = torch.tensor([1.0, 1.0625, 1.07, 448.0, 2.0**-9, 2.0**-11])
    assert torch.equal(round_to_e4m3(x), torch.tensor([1.0, 1.0, 1.125, 448.0, 2.0**-9, 0.0]))


BOUNDS = {"fp8-blockwise": 1 / 16, "mxfp8": 1 / 16, "nvfp4": 1 / 6 + 1 / 16}
"""Largest error of a block relative to its largest value: half the widest step of the format. For e2m1 half of 2 in 6,
and the loss of a scale of 4 bits."""


@pytest.mark.parametrize("name", QUANT_FORMATS)
@pytest.mark.parametrize("rows", [1, 16])
def test_every_block_has_its_own_scale(name, rows):
    recipe = QUANT_FORMATS[name]
    x = torch.randn(37, 3 * recipe.block_size + 5, dtype=torch.float64) * torch.logspace(-1, 2, 37)[:, None]
    y = fake_quantize(x, recipe, rows)
    assert y.shape == x.shape
    assert y.dtype == torch.float64
    assert not torch.equal(y, x)
    for block, of in zip(y.split(recipe.block_size, 1), x.split(recipe.block_size, 1), strict=True):
        for part, whole in zip(block.split(rows), of.split(rows), strict=True):
            assert (part - whole).abs().max() <= BOUNDS[name] * whole.abs().max()


@pytest.mark.parametrize("name", QUANT_FORMATS)
def test_a_part_of_a_tensor_is_rounded_as_in_the_whole(name):
    """A mapping computes the same as one rank because whole blocks that are cut off change nothing."""
    recipe = QUANT_FORMATS[name]
    x = torch.randn(48, 4 * recipe.block_size, dtype=torch.float64) * 10
    whole = fake_quantize(x, recipe, 16)
    assert torch.equal(fake_quantize(x[16:32], recipe, 16), whole[16:32])
    assert torch.equal(fake_quantize(x[:, recipe.block_size :], recipe, 16), whole[:, recipe.block_size :])


@pytest.mark.parametrize("name", QUANT_FORMATS)
def test_zeros_stay_zeros_and_nothing_becomes_nan(name):
    recipe = QUANT_FORMATS[name]
    assert torch.equal(fake_quantize(torch.zeros(3, 40), recipe), torch.zeros(3, 40))
    assert fake_quantize(torch.zeros(0, 40), recipe).shape == (0, 40)
