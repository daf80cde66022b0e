"""A file that breaks while a run goes on: which samples are lost, and the message of the reader."""

import os
import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from moefold.config.sections.data import DataConfig
from moefold.data.dataset import DataRequest, Dataset
from moefold.data.shard_reader import BrokenShardError, DocumentEnds, OutOfVocabError, open_ends_file
from moefold.data.skip_corrupt import corrupt_files
from moefold.data.token_file import TokenFile
from moefold.data.token_file_set import TokenFileSet, build_token_file_set
from moefold.data.token_stream import TokenFileStream
from moefold.errors import ConfigError, RunError

S = 8
LENGTHS = (90, 41, 200, 17)
NAMES = {"train": "training", "validation": "validation"}


def owned(folder: Path) -> Path:
    """Files whose ids show the file that they are of: number * 1000 and more."""
    folder.mkdir()
    for number, length in enumerate(LENGTHS):
        np.save(folder / f"{number}.npy", np.arange(length, dtype=np.uint16) + 1000 * number)
        np.array([length // 3, length // 2, length], dtype="<i8").tofile(folder / f"{number}.ends")
    return folder


def opened(data: DataConfig, lost: dict[str, str]) -> Dataset:
    shards = build_token_file_set(data, vocab_size=5000).without(lost)
    return DataRequest(data, seq_len=S, vocab_size=5000, seed=3).open(shards)


def recipe(path: str | tuple[str, ...], **changes: object) -> DataConfig:
    return DataConfig(**{"kind": "tokens", "path": path, "validation_fraction": 0.2, **changes})


@pytest.mark.parametrize("changes", [{}, {"shuffle": False}, {"document_end": 1005}, {"document_index": True}])
@pytest.mark.parametrize("lost", [[0], [1], [3], [0, 2], [1, 2]])
@pytest.mark.parametrize("part", ["train", "validation"])
def test_only_the_samples_of_a_lost_file_are_left_out(tmp_path, changes, lost, part):
    folder = owned(tmp_path / "tokens")
    data = recipe(str(folder), **changes)
    whole = getattr(opened(data, {}), part)
    samples = [whole.sample(i) for i in range(3 * len(whole))]
    for number in lost:
        (folder / f"{number}.npy").unlink()
        (folder / f"{number}.ends").unlink()
    shards = shards_of(folder, {f"{folder}/{number}.npy": "gone" for number in lost})
    left = getattr(DataRequest(data, seq_len=S, vocab_size=5000, seed=3).open(shards), part)
    kept = [i for i, tokens in enumerate(samples) if not set(tokens // 1000) & set(lost)]
    assert left.num_dropped == len(whole) - len([i for i in kept if i < len(whole)])
    if not kept:
        with pytest.raises(RunError, match=f"every {NAMES[part]} sample belongs to a skipped file"):
            left.next_sample_indices(0, 4)
        return
    taken: list[int] = []
    while len(taken) + 4 <= len(kept):
        taken += left.next_sample_indices(taken[-1] + 1 if taken else 0, 4)
    assert taken == kept[: len(taken)]
    assert all((left.sample(i) == samples[i]).all() for i in taken)
    assert left.origin(kept[0]) == whole.origin(kept[0])


def shards_of(folder: Path, lost: dict[str, str]) -> TokenFileSet:
    return TokenFileSet({f"{folder}/{number}.npy": length for number, length in enumerate(LENGTHS)}, lost)


def test_mixture_continues_with_the_other_samples_of_each_part(tmp_path):
    parts = (owned(tmp_path / "a"), owned(tmp_path / "b"))
    data = recipe(tuple(map(str, parts)), weights=(2, 1), validation_fraction=0.0)
    whole = opened(data, {}).train
    left = opened(data, {f"{parts[0]}/2.npy": "gone"}).train
    kept = [i for i in range(90) if whole.locate(i)[0] == 1 or not (whole.sample(i) // 1000 == 2).any()]  # type: ignore[attr-defined]
    assert 0 < left.num_dropped < len(left)
    assert list(left.next_sample_indices(0, len(kept))) == kept
    all_of_one = opened(data, {f"{parts[0]}/{number}.npy": "gone" for number in range(4)}).train
    assert all(whole.locate(i)[0] == 1 for i in all_of_one.next_sample_indices(0, 50))  # type: ignore[attr-defined]


def test_samples_left_out_for_another_reason_are_stepped_over(tmp_path):
    row = opened(recipe(str(owned(tmp_path / "tokens"))), {}).train
    left_out = (range(8, 12), range(12, 16))
    batches = [list(row.next_sample_indices(first, 4, left_out)) for first in (0, 4, 8, 12, 16)]
    assert batches == [[0, 1, 2, 3], [4, 5, 6, 7], *[[16, 17, 18, 19]] * 3]
    # A batch of another size may touch it with one end, and loses nothing else.
    assert list(row.next_sample_indices(5, 6, left_out)) == [5, 6, 7, 16, 17, 18]
    assert list(row.next_sample_indices(15, 2, left_out)) == [16, 17]


def test_nothing_left_is_an_error_and_no_endless_search(tmp_path):
    folder = owned(tmp_path / "tokens")
    row = opened(recipe(str(folder)), {f"{folder}/{number}.npy": "gone" for number in range(4)}).train
    with pytest.raises(RunError, match="every training sample belongs to a skipped file"):
        row.next_sample_indices(0, 4)


def cut(path: Path) -> None:
    os.truncate(path, 100)


def put_something_else(path: Path) -> None:
    path.unlink()
    np.save(path, np.zeros(50, dtype=np.uint16))


BREAKS: dict[str, tuple[Callable[[Path], None], str]] = {
    "cut": (cut, r"1.npy broke while the run read it: it has 100 of \d+ bytes"),
    "replaced": (put_something_else, r"1.npy broke while the run read it: it holds uint16 \[50\], not 2000 ids"),
    "gone": (Path.unlink, r"1.npy broke while the run read it: it is not a complete .npy array .*No such file"),
}


@pytest.mark.parametrize("is_open", [True, False])
@pytest.mark.parametrize("kind", BREAKS)
def test_a_file_that_breaks_under_a_reader_is_named(tmp_path, kind, is_open):
    files = []
    for number in range(3):
        np.save(tmp_path / f"{number}.npy", np.arange(2000, dtype=np.uint16))
        files.append(TokenFile(tmp_path / f"{number}.npy", 2000, None, f"tokens/{number}.npy"))
    stream = TokenFileStream(tuple(files), vocab_size=2000)
    if is_open:
        stream.read(2000, 2010)
    BREAKS[kind][0](tmp_path / "1.npy")
    if is_open and kind != "cut":
        # The open file is the file that the run began with.
        assert stream.read(3990, 4000).tolist() == list(range(1990, 2000))
        return
    message = BREAKS[kind][1] if is_open or kind != "cut" else "1.npy broke while .*not a complete .npy array"
    with pytest.raises(BrokenShardError, match=message) as caught:
        stream.read(3990, 4010)
    assert caught.value.shard == "tokens/1.npy"
    assert 'set data.corrupt="skip" to continue without it' in str(caught.value)
    assert "skip" not in caught.value.cause
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    stream.drop_files([caught.value.shard])
    assert stream.is_dropped(3999, 4001)
    assert not stream.is_dropped(4000, 4010)
    assert stream.read(4000, 4010).tolist() == list(range(10))


def test_an_index_of_documents_is_read_from_the_disk(tmp_path):
    draw = np.random.default_rng(0)
    ends = np.sort(draw.integers(0, 40_000, 5000))
    ends[-1] = 40_000
    ends.astype("<i8").tofile(tmp_path / "x.ends")
    index = DocumentEnds(open_ends_file(tmp_path / "x.ends", shard="x.npy"), 40_000)
    assert len(index) == 5000
    for start in [0, 1, 39_999, *draw.integers(0, 39_000, 50).tolist()]:
        for length in (1, 7, 900, 30_000):
            stop = min(start + length, 40_000)
            assert index.between(start, stop).tolist() == ends[(ends >= start) & (ends < stop)].tolist()
        assert index.document_of(start) == int((ends <= start).sum())
    os.truncate(tmp_path / "x.ends", 400)
    with pytest.raises(BrokenShardError, match="x.ends broke .* it has 400 of 40000 bytes") as caught:
        index.between(30_000, 30_010)
    assert caught.value.shard == "x.npy"


def test_a_file_with_strange_ids_is_left_out_by_name(tmp_path):
    folder = owned(tmp_path / "tokens")
    data = recipe(str(folder), corrupt="skip")
    shards = build_token_file_set(data, vocab_size=3000)
    assert list(shards.dropped) == [f"{folder}/3.npy"]
    why = shards.dropped[f"{folder}/3.npy"]
    assert why == f"{folder}/3.npy holds id 3000 at token 0, but ids must be at least 0 and below model.vocab_size=3000"
    with pytest.raises(ConfigError, match="holds no valid file: .*raise it"):
        build_token_file_set(data, vocab_size=0)
    with pytest.raises(OutOfVocabError, match="3.npy holds id 3000"):
        TokenFileStream(build_token_file_set(recipe(str(folder)), vocab_size=3000).files(data), vocab_size=3000).probe()


def test_a_named_file_that_is_not_there_is_left_out_like_others(tmp_path):
    folder = owned(tmp_path / "tokens")
    names = (f"{folder}/0.npy", f"{folder}/none.npy")
    with pytest.raises(ConfigError, match=r"none.npy' does not exist"):
        build_token_file_set(recipe(names), vocab_size=5000)
    faults = corrupt_files(recipe(names, corrupt="skip"))
    assert [path.name for path in faults] == ["none.npy"]
    shards = build_token_file_set(recipe(names, corrupt="skip"), vocab_size=5000, skipped={names[1]})
    assert dict(shards.num_tokens) == {names[0]: LENGTHS[0]}
