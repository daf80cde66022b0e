"""Synthetic tokens follow their formula, for any sample, by seed."""

import tracemalloc

import numpy as np
import pytest

from moefold.data.synthetic_samples import JUMP_PROBABILITY, NUM_SAMPLES, SyntheticSamples


def make(seed: int = 0, vocab_size: int = 1000, seq_len: int = 64) -> SyntheticSamples:
    return SyntheticSamples(seed=seed, vocab_size=vocab_size, seq_len=seq_len)


@pytest.mark.parametrize("vocab_size", [1, 2, 3, 256, 151_936, 2**31])
@pytest.mark.parametrize("seq_len", [1, 7, 512])
def test_ids_are_in_the_vocabulary(vocab_size: int, seq_len: int):
    tokens = make(vocab_size=vocab_size, seq_len=seq_len).sample(3)
    assert tokens.dtype == np.int64
    assert tokens.shape == (seq_len + 1,)
    assert 0 <= tokens.min() <= tokens.max() < vocab_size


def test_same_seed_same_tokens_and_other_seed_other_tokens():
    assert np.array_equal(make().sample(5), make().sample(5))
    assert not np.array_equal(make().sample(5), make().sample(6))
    assert not np.array_equal(make().sample(5), make(seed=1).sample(5))


def test_synthetic_tokens_by_hand():
    assert make(vocab_size=100, seq_len=11).sample(0).tolist() == [18, 31, 44, 57, 70, 83, 96, 9, 22, 35, 48, 61]


def test_a_sample_follows_one_stride_but_for_jumps():
    source = make(seq_len=4000)
    strides = []
    for i in range(40):
        steps = np.diff(source.sample(i)) % 1000
        stride, count = np.unique(steps, return_counts=True)
        strides.append(int(stride[count.argmax()]))
        assert abs(count.max() / 4000 - (1 - JUMP_PROBABILITY)) < 0.03
    assert len(set(strides)) == 4


def test_every_id_occurs():
    source = make(vocab_size=300, seq_len=512)
    seen = np.unique(np.concatenate([source.sample(i) for i in range(40)]))
    assert len(seen) == 300


def test_samples_far_out_cost_no_memory():
    tracemalloc.start()
    source = make()
    assert len(source) == NUM_SAMPLES
    source.sample(NUM_SAMPLES - 1)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 1_000_000


@pytest.mark.parametrize("number", [-1, NUM_SAMPLES])
def test_refuses_a_sample_outside(number: int):
    with pytest.raises(IndexError, match="outside"):
        make().sample(number)
