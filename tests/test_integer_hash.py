"""Integer hashes equal the published generator, for scalars and arrays, and are even."""

import numpy as np

from moefold.integer_hash import draw_bits, hash_ints, splitmix64


def test_draws_equal_the_published_generator():
    # Reference outputs of SplitMix64: seed 0, and the first of seed 1234567.
    assert [int(x) for x in draw_bits(0, 3)] == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert int(draw_bits(1234567, 1)[0]) == 6457827717110365317


def test_scalar_and_array_mixers_agree():
    golden = 0x9E3779B97F4A7C15
    assert [splitmix64(7 + golden * i) for i in range(1, 50)] == [int(x) for x in draw_bits(7, 49)]


def test_combine_depends_on_order_count_and_sign():
    hashes = {
        hash_ints(),
        hash_ints(0),
        hash_ints(0, 0),
        hash_ints(1, 2),
        hash_ints(2, 1),
        hash_ints(-1),
        hash_ints(12),
    }
    assert len(hashes) == 7
    assert all(0 <= h < 2**64 for h in hashes)


def test_draws_are_even():
    share_of_ones = np.unpackbits(draw_bits(3, 20_000).view(np.uint8)).mean()
    assert abs(share_of_ones - 0.5) < 0.005
