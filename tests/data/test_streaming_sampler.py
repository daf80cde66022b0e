"""Streams pack text in order or shuffled by block, and a state leads to the same samples."""

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from moefold.data.packed_samples import PackedSamples
from moefold.data.streaming_sampler import StreamingSampler
from moefold.data.tokenizer import ByteTokenizer
from moefold.errors import ConfigError
from tests.data.memory_stream import MemoryStream

S = 16


class Texts:
    """Documents whose state is their number; counts how many were read."""

    def __init__(self, texts: list[str]) -> None:
        self.texts, self.num_read = texts, 0

    def documents(self, state: Any) -> Iterator[tuple[str, Any]]:
        for number in range(state or 0, len(self.texts)):
            self.num_read += 1
            yield self.texts[number], number


def texts(count: int = 3000) -> Texts:
    return Texts([f"document {i}" + "x" * (i % 40) for i in range(count)])


def row(source: Texts, *, order_key: int | None = 3, document_end: int = -1) -> StreamingSampler:
    return StreamingSampler(source, ByteTokenizer(), seq_len=S, order_key=order_key, document_end=document_end)


def tokens(stream: StreamingSampler, numbers: range) -> list[list[int]]:
    return [stream.sample(i).tolist() for i in numbers]


def test_in_order_it_is_the_text_packed_epoch_after_epoch():
    source = texts(200)
    stream = row(source, order_key=None)
    text = "".join(document + "\0" for document in source.texts) * 6
    packed = PackedSamples(MemoryStream(np.frombuffer(text.encode(), dtype=np.uint8)), S)
    numbers = range(stream.block_samples + 50)
    assert len(packed) > len(numbers)
    assert tokens(stream, numbers) == [packed.sample(i).tolist() for i in numbers]


def test_shuffling_stays_within_a_block():
    ordered, shuffled = row(texts(), order_key=None), row(texts())
    for block in range(2):
        numbers = range(block * ordered.block_samples, (block + 1) * ordered.block_samples)
        assert tokens(ordered, numbers) != tokens(shuffled, numbers)
        assert sorted(tokens(ordered, numbers)) == sorted(tokens(shuffled, numbers))


@pytest.mark.parametrize("at", [1, 1023, 1024, 2500])
def test_a_state_leads_to_the_same_samples_without_reading_earlier_ones(at: int):
    whole = row(texts())
    expected = tokens(whole, range(3200))
    stopped = row(texts())
    tokens(stopped, range(at))
    state = json.loads(json.dumps(stopped.state(at)))
    source = texts()
    resumed = row(source)
    resumed.restore(state)
    assert tokens(resumed, range(at, 3200)) == expected[at:]
    assert tokens(row(texts()), range(at, at + 5)) == expected[at : at + 5], "without a state it must be the same"
    if at == 2500:
        first = row(source := texts())
        first.restore(state)
        first.sample(at)
        assert source.num_read < 3000
    assert resumed.sample(0).tolist() == expected[0]


def test_the_state_of_a_rank_that_lags_leads_there_too():
    # A rank that read the first samples of a batch has not seen the block where the next batch begins.
    lagging = row(texts())
    lagging.sample(1000)
    resumed = row(texts())
    resumed.restore(lagging.state(2100))
    assert resumed.sample(2100).tolist() == row(texts()).sample(2100).tolist()
    assert lagging.state(5) is not None
    lagging.sample(1030)
    assert lagging.state(5) is None


def test_documents_are_numbered():
    sample = row(texts(), order_key=None, document_end=0).annotated_sample(3)
    ends = np.flatnonzero(sample.tokens[:-1] == 0)
    assert len(ends)
    assert np.flatnonzero(np.diff(sample.document_ids)).tolist() == ends.tolist()


def test_data_without_text_is_refused():
    with pytest.raises(ConfigError, match="holds no text"):
        row(Texts([])).sample(0)
