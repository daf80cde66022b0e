"""Changes of files under the same name that are noticed, and their cost."""

import os
from pathlib import Path

import numpy as np
import pytest

from moefold.config.sections.data import DataConfig
from moefold.data.fingerprint import BLOCK_BYTES, file_sizes, fingerprint, size_differences
from moefold.data.input_paths import file_differences


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for i in range(3):
        np.save(tmp_path / f"{i}.npy", np.arange(100_000, dtype=np.uint16) + i)
    (tmp_path / "notes.txt").write_text("no data")
    return tmp_path


def recipe(folder: Path, **changes: object) -> DataConfig:
    return DataConfig(**{"kind": "tokens", "path": str(folder), **changes})


def test_names_equal_the_names_in_the_recipe(folder, monkeypatch):
    monkeypatch.chdir(folder.parent)
    looks = fingerprint(recipe(Path(folder.name)))
    assert list(looks) == [f"{folder.name}/{i}.npy" for i in range(3)]
    assert len(set(looks.values())) == 3
    assert looks == fingerprint(recipe(Path(folder.name)))
    for name, seen in file_sizes(recipe(Path(folder.name))).items():
        assert seen == looks[name].split()[0] == str(os.path.getsize(folder.parent / name))


@pytest.mark.parametrize("place", [0, 130, -1])
def test_another_header_start_or_end_is_noticed(folder, place):
    before = fingerprint(recipe(folder))
    content = bytearray((folder / "1.npy").read_bytes())
    content[place] ^= 1
    (folder / "1.npy").write_bytes(content)
    assert list(file_differences(before, fingerprint(recipe(folder))).values()) == [
        f"data file {folder}/1.npy has other content than then"
    ]


def test_rewritten_file_is_detected_and_a_copy_is_not(folder):
    before = fingerprint(recipe(folder))
    content = (folder / "1.npy").read_bytes()
    os.utime(folder / "1.npy", (0, 0))
    assert fingerprint(recipe(folder)) == before
    middle = len(content) // 2 // BLOCK_BYTES * BLOCK_BYTES
    other = bytearray(content)
    other[BLOCK_BYTES:-BLOCK_BYTES] = os.urandom(len(content) - 2 * BLOCK_BYTES)
    (folder / "1.npy").write_bytes(other)
    assert file_differences(before, fingerprint(recipe(folder)))
    assert middle


def test_differences_are_named(folder):
    then = {"a": "1 x", "b": "1 x", "c": "skipped", "d": "1 x", "same": "2 y"}
    now = {"a": "1 y", "c": "1 x", "d": "skipped", "e": "1 x", "same": "2 y"}
    assert list(file_differences(then, now).values()) == [
        "data file a has other content than then",
        "data file b is gone",
        "data file c was left out as corrupt then, and is not now",
        "data file d is left out as corrupt, and was not then",
        "data file e is new",
    ]


def test_rank_that_sees_other_files_names_them(folder):
    first = fingerprint(recipe(folder))
    assert size_differences(first, file_sizes(recipe(folder))) == {}
    (folder / "1.npy").unlink()
    np.save(folder / "2.npy", np.arange(5, dtype=np.uint16))
    name = f"{folder}/2.npy"
    assert list(size_differences(first, file_sizes(recipe(folder))).values()) == [
        f"{folder}/1.npy is not there",
        f"{name} has {os.path.getsize(folder / '2.npy')} bytes, and {first[name].split()[0]} there",
    ]


def test_a_terabyte_costs_some_blocks(folder):
    with (folder / "big.bin").open("wb") as file:
        file.truncate(2**40)
    assert fingerprint(recipe(folder))[f"{folder}/big.bin"].startswith(f"{2**40} ")


def test_the_tokenizer_and_pythons_own_text_count_too(folder, make_tokenizer_file):
    tokenizer = make_tokenizer_file("<eos>")
    (folder / "a.txt").write_text("text")
    data = recipe(folder / "a.txt", kind="text", tokenizer=str(tokenizer))
    before = fingerprint(data)
    assert list(before) == [str(folder / "a.txt"), "tokenizer.json"]
    tokenizer.write_text(tokenizer.read_text() + " ")
    assert list(file_differences(before, fingerprint(data)).values()) == [
        "data file tokenizer.json has other content than then"
    ]
    assert list(fingerprint(DataConfig())) == ["python-docs"]
    assert fingerprint(DataConfig(kind="synthetic")) == {}
