"""Test best-fit packing of a stream: whole documents, every target once, one packing for all ranks."""

import random
from pathlib import Path

import numpy as np
import pytest

from moefold.config.sections.data import DataConfig
from moefold.data import best_fit
from moefold.data.best_fit import BestFitSamples, DocumentBoundaries, document_windows, open_best_fit, pack_documents
from moefold.data.dataset import DataRequest
from moefold.data.sample import stack_samples
from moefold.errors import ConfigError
from tests.data.memory_stream import MemoryStream

S = 15
END = 0


def _documents(count: int, seed: int = 0, longest: int = 40) -> list[np.ndarray]:
    """Return documents of tokens that are all different, each with an end token."""
    rng = random.Random(seed)
    first = 1
    found = []
    for _ in range(count):
        length = rng.choice([1, 2, 3, 5, 9, S, S + 1, S + 2, 2 * S + 1, longest])
        found.append(np.append(np.arange(first, first + length - 1), END))
        first += length
    return found


def _open(documents: list[np.ndarray], folder: Path) -> BestFitSamples:
    stream = MemoryStream(np.concatenate(documents))
    file = folder / "ids.npy"
    np.save(file, stream.ids)
    return open_best_fit(stream, DocumentBoundaries(stream, END), [file], seq_len=S, pad_id=END)


@pytest.mark.parametrize("seed", range(3))
def test_documents_are_whole_and_every_target_counts_once(seed, tmp_path: Path):
    documents = _documents(60, seed)
    samples = _open(documents, tmp_path)
    batch = stack_samples([samples.annotated_sample(i) for i in range(len(samples))], S)
    weights = batch.target_weights()
    assert weights is not None
    pairs = np.stack((batch.inputs, batch.labels), -1)[weights > 0]
    expected = np.concatenate([np.stack((one[:-1], one[1:]), -1) for one in documents])
    assert sorted(map(tuple, pairs.tolist())) == sorted(map(tuple, expected.tolist()))
    # A document that fits is one document of one sample.
    rows = {
        int(token): (i, int(document))
        for i in range(len(samples))
        for token, document in zip(batch.tokens[i], batch.document_ids[i], strict=True)
    }
    for one in documents:
        if 1 < len(one) <= S + 1:
            assert len({rows[int(token)] for token in one[:-1]}) == 1
    assert batch.is_padding is not None
    assert (batch.tokens[batch.is_padding] == END).all()
    assert not (batch.is_padding[:, :-1] & ~batch.is_padding[:, 1:]).any(), "padding is at the end"
    counts = samples.counts
    assert counts.num_documents == len(documents)
    assert counts.num_single == sum(len(one) == 1 for one in documents)
    assert counts.num_split == sum(len(one) > S + 1 for one in documents)
    assert counts.num_samples == len(samples)
    assert counts.num_tokens == (~batch.is_padding).sum()


def test_long_documents_share_one_token_between_parts():
    assert pack_documents([2 * S + 1], S) == [[(0, 0, S + 1)], [(0, S, S + 1)]]
    assert pack_documents([S + 2, 1, 4], S) == [[(0, 0, S + 1)], [(0, S, 2), (2, 0, 4)]]
    assert pack_documents([1, 1], S) == []


def test_windows_cover_the_stream_and_are_bounded(monkeypatch: pytest.MonkeyPatch):
    documents = _documents(500, seed=4)
    stream = MemoryStream(np.concatenate(documents))
    boundaries = DocumentBoundaries(stream, END)
    starts = np.cumsum([0, *map(len, documents)])
    for chunk in (7, 64, 10**6):
        monkeypatch.setattr(best_fit, "_CHUNK_TOKENS", chunk)
        for window_tokens, window_documents in ((100, 1000), (10**9, 16), (10**9, 10**9), (1, 1)):
            windows = list(document_windows(len(stream), boundaries, window_tokens, window_documents))
            assert np.concatenate([windows[0], *(bounds[1:] for bounds in windows[1:])]).tolist() == starts.tolist()
            for bounds in windows:
                assert len(bounds) - 1 <= window_documents
                assert bounds[-2] - bounds[0] < window_tokens
            for bounds, further in zip(windows, windows[1:], strict=False):
                assert bounds[-1] == further[0]


def test_a_packing_in_windows_is_stored_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(best_fit, "WINDOW_TOKENS", 100)
    monkeypatch.setattr(best_fit, "WINDOW_SAMPLES", 1)
    monkeypatch.setattr(best_fit, "_CHUNK_PARTS", 5)
    documents = _documents(200, seed=2)
    first = _open(documents, tmp_path)
    monkeypatch.setattr(best_fit, "_write_packing", None)
    again = _open_from_cache(documents, tmp_path)
    assert [first.sample(i).tolist() for i in range(len(first))] == [
        again.sample(i).tolist() for i in range(len(again))
    ]
    assert first.counts == again.counts


def _open_from_cache(documents: list[np.ndarray], folder: Path) -> BestFitSamples:
    stream = MemoryStream(np.concatenate(documents))
    boundaries = DocumentBoundaries(stream, END)
    return open_best_fit(stream, boundaries, [folder / "ids.npy"], seq_len=S, pad_id=END)


def test_a_stream_without_targets_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="no document of two tokens"):
        _open([np.array([END])] * 5, tmp_path)


def test_a_data_set_is_packed(tmp_path: Path):
    np.save(tmp_path / "ids.npy", np.concatenate(_documents(100)).astype(np.uint16))
    data = DataConfig(
        kind="tokens", path=str(tmp_path / "ids.npy"), document_end=END, packing="best_fit", validation_fraction=0.1
    )
    parts = [DataRequest(data, seq_len=S, vocab_size=2**16, seed=seed).open() for seed in (1, 1, 2)]
    train = parts[0].train
    assert train.has_annotations
    samples = [[part.train.sample(i).tolist() for i in range(len(train))] for part in parts]
    assert samples[0] == samples[1]
    assert samples[0] != samples[2]
    assert sorted(samples[0]) == sorted(samples[2])
    held_out = [parts[0].validation.sample(i).tolist() for i in range(len(parts[0].validation))]
    assert held_out
    assert not {tuple(one) for one in held_out} & {tuple(one) for one in samples[0]}
    assert "ids.npy, token" in train.origin(0)
