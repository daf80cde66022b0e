"""Normal numbers by position: the published vectors of the generator, and the same numbers from any part."""

import torch

from moefold_experiments.spsa.counter_normal import normal_rows, philox, uniform
from moefold_experiments.spsa.oracle import normal_matrix

PI = ((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), 0xA4093822 | 0x299F31D0 << 32)
"""Digits of pi as counter and key: the third vector of Random123's kat_vectors for philox4x32-10."""
PI_WORDS = (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)
ONES = 0xFFFFFFFF


def test_published_vectors():
    assert philox((0, 0, 0, 0), 0) == (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)
    assert philox((ONES,) * 4, ONES | ONES << 32) == (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)
    assert philox(*PI) == PI_WORDS
    words = philox(tuple(torch.tensor([word, 0]) for word in PI[0]), PI[1])
    assert tuple(int(word[0]) for word in words) == PI_WORDS


def test_a_part_has_the_numbers_of_the_whole():
    whole = normal_rows(77, 3, torch.arange(9), slice(0, 13))
    part = normal_rows(77, 3, torch.tensor([2, 7, 8]), slice(6, 11))
    assert torch.equal(part, whole[[2, 7, 8], 6:11])
    assert torch.equal(whole.double(), normal_matrix(77, 3, 9, 13))
    keys = torch.tensor([77, 78])
    assert torch.equal(normal_rows(keys, 3, torch.tensor([2, 2]), slice(0, 13))[0], whole[2])
    assert torch.equal(
        normal_rows(keys, 3, torch.tensor([2, 2]), slice(0, 13))[1].double(), normal_matrix(78, 3, 3, 13)[2]
    )
    for other in (normal_rows(78, 3, torch.arange(9), slice(0, 13)), normal_rows(77, 4, torch.arange(9), slice(0, 13))):
        assert not torch.isclose(other, whole).any()


def test_moments_follow_the_normal_law():
    x = normal_rows(2**63 - 1, 1, torch.arange(1000), slice(0, 500)).double()
    # Within five standard errors of 500,000 numbers.
    assert abs(float(x.mean())) < 5 * 500_000**-0.5
    assert abs(float(x.square().mean()) - 1) < 5 * (2 / 500_000) ** 0.5
    assert abs(float(x.pow(4).mean()) - 3) < 5 * (96 / 500_000) ** 0.5
    for neighbour in (x[:, 1:] * x[:, :-1], x[1:] * x[:-1]):
        assert abs(float(neighbour.mean())) < 5 * neighbour.numel() ** -0.5


def test_uniform_numbers_of_streams_differ():
    numbers = [uniform(5, step) for step in range(1000)]
    assert 0 < min(numbers) < 0.02
    assert 0.98 < max(numbers) < 1
    assert len(set(numbers)) == 1000
