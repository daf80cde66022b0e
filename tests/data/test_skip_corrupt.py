"""Test files that cannot be read to their end: they are fatal, or the same ones are left out from then on."""

import gzip
import json
import logging
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from moefold.config.sections.data import DataConfig
from moefold.data.dataset import DataRequest, Dataset
from moefold.data.fingerprint import fingerprint
from moefold.data.skip_corrupt import skipped_files
from moefold.data.validate_source import check_data
from moefold.errors import ConfigError

from .conftest import make_text

S = 96
FILES = 4
BROKEN = 2


def text(i: int) -> str:
    return make_text(150 + 20 * i, 1000 * i)


def tokens(folder: Path, i: int) -> Path:
    np.save(folder / f"{i}.npy", np.frombuffer(text(i).encode(), dtype=np.uint8).astype(np.uint16))
    return folder / f"{i}.npy"


def bare(folder: Path, i: int) -> Path:
    np.frombuffer(text(i).encode(), dtype=np.uint8).astype(np.uint16).tofile(folder / f"{i}.bin")
    return folder / f"{i}.bin"


def plain(folder: Path, i: int) -> Path:
    (folder / f"{i}.txt").write_text(text(i))
    return folder / f"{i}.txt"


def jsonl(folder: Path, i: int) -> Path:
    file = folder / f"{i}.jsonl"
    file.write_text("".join(json.dumps({"text": line}) + "\n" for line in text(i).splitlines()))
    return file


def parquet(folder: Path, i: int) -> Path:
    datasets = pytest.importorskip("datasets")
    file = folder / f"train-{i}.parquet"
    datasets.Dataset.from_dict({"text": text(i).splitlines()}).to_parquet(str(file))
    return file


def long_parquet(folder: Path, i: int) -> Path:
    """As long as many samples of a stream, which reopens its files in every epoch."""
    datasets = pytest.importorskip("datasets")
    file = folder / f"train-{i}.parquet"
    datasets.Dataset.from_dict({"text": make_text(9000, 20_000 * i).splitlines()}).to_parquet(str(file))
    return file


def chats(folder: Path, i: int) -> Path:
    file = folder / f"{i}.jsonl.gz"
    lines = (json.dumps({"prompt": f"{i} {n}", "response": "word " * (n % 5 + 1)}) + "\n" for n in range(30))
    file.write_bytes(gzip.compress("".join(lines).encode()))
    return file


def cut(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2 | 1)


def latin(file: Path) -> None:
    file.write_bytes(file.read_bytes() + b"caf\xe9")


KINDS: dict[str, tuple[Callable[[Path, int], Path], Callable[[Path], None], dict[str, object]]] = {
    "npy": (tokens, cut, {"kind": "tokens"}),
    "bin": (bare, cut, {"kind": "tokens"}),
    "text": (plain, latin, {"kind": "text"}),
    "jsonl": (jsonl, cut, {"kind": "huggingface"}),
    "parquet": (parquet, cut, {"kind": "huggingface"}),
    "streamed": (long_parquet, cut, {"kind": "huggingface", "streaming": True}),
    "sft": (chats, cut, {"kind": "sft"}),
}


def recipe(kind: str, path: Path | tuple[Path, ...], **changes: object) -> DataConfig:
    names = tuple(map(str, path)) if isinstance(path, tuple) else str(path)
    return DataConfig(**{"path": names, "validation_fraction": 0.0, **KINDS[kind][2], **changes})


def open_data(data: DataConfig) -> Dataset:
    return DataRequest(data, seq_len=S, vocab_size=256, seed=0).open()


def first_samples(data: DataConfig, count: int = 40) -> list[list[int]]:
    row = open_data(data).train
    return [row.sample(i).tolist() for i in range(count)]


def make(folder: Path, kind: str, numbers: list[int]) -> Path:
    folder.mkdir()
    for i in numbers:
        KINDS[kind][0](folder, i)
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_a_corrupt_file_is_fatal_or_left_out_and_named_once(tmp_path, kind, caplog):
    folder = make(tmp_path / "data", kind, list(range(FILES)))
    broken = sorted(folder.iterdir())[BROKEN]
    KINDS[kind][1](broken)
    sizes = {"seq_len": S, "vocab_size": 256, "seed": 0}
    with pytest.raises(ConfigError, match=broken.name):
        DataRequest(recipe(kind, folder), **sizes).prepare()
    skips = recipe(kind, folder, corrupt="skip")
    check_data(DataRequest(skips, **sizes))
    with caplog.at_level(logging.WARNING):
        DataRequest(skips, **sizes).prepare()
    named = [r.getMessage() for r in caplog.records if "left out" in r.getMessage()]
    assert [message.count(str(broken)) for message in named] == [1]
    without = make(tmp_path / "without", kind, [i for i in range(FILES) if i != BROKEN])
    assert first_samples(skips) == first_samples(recipe(kind, without))
    looks = fingerprint(skips)
    assert [seen == "skipped" for seen in looks.values()] == [i == BROKEN for i in range(FILES)]


@pytest.mark.parametrize("kind", KINDS)
def test_skip_changes_nothing_where_all_is_sound(tmp_path, kind):
    folder = make(tmp_path / "data", kind, list(range(FILES)))
    skips = recipe(kind, folder, corrupt="skip")
    assert first_samples(skips) == first_samples(recipe(kind, folder))


def test_ranks_use_the_files_found_before_they_started(tmp_path):
    folder = make(tmp_path / "data", "text", [0, 1, 2])
    data = recipe("text", folder, corrupt="skip")
    latin(folder / "1.txt")
    DataRequest(data, seq_len=S, vocab_size=256, seed=0).prepare()
    seen = skipped_files(data)
    assert {file.name for file in seen} == {"1.txt"}
    status = (folder / "1.txt").stat()
    (folder / "1.txt").write_bytes(b"a" * status.st_size)
    os.utime(folder / "1.txt", ns=(status.st_atime_ns, status.st_mtime_ns))
    assert skipped_files(data) == seen
    (folder / "1.txt").write_bytes(b"b" * status.st_size)
    assert not skipped_files(data)


def test_data_without_any_sound_sample_is_refused_with_the_errors(tmp_path):
    folder = make(tmp_path / "data", "text", [0])
    latin(folder / "0.txt")
    with pytest.raises(ConfigError, match=r"holds no valid file: .*0.txt is not UTF-8"):
        open_data(recipe("text", folder, corrupt="skip"))
