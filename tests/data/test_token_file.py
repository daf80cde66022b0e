"""Token files of each form are mapped as one row and checked before ranks start."""

import os
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from moefold.config.sections.data import DataConfig
from moefold.data.packed_samples import PackedSamples
from moefold.data.token_file import TokenFile, read_npy_header, token_files
from moefold.data.token_stream import TokenFileStream
from moefold.errors import ConfigError


def config(*paths: Path, token_dtype: str = "uint16") -> DataConfig:
    return DataConfig(kind="tokens", path=tuple(map(str, paths)), token_dtype=token_dtype)  # type: ignore[arg-type]


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """Tokens 0 .. 99 in three files of both forms and several types, and files of other kinds."""
    folder = tmp_path / "shards"
    (folder / "late").mkdir(parents=True)
    np.arange(0, 30, dtype="<u2").tofile(folder / "a.bin")
    np.save(folder / "b.npy", np.arange(30, 33, dtype=">i8"))
    np.save(folder / "late" / "c.npy", np.arange(33, 100, dtype=np.int32))
    (folder / "index.json").write_text("{}")
    (folder / "empty.bin").touch()
    return folder


def test_shards_read_as_one_row(shards: Path):
    files = token_files(config(shards))
    assert [file.path.name for file in files] == ["a.bin", "b.npy", "c.npy"]
    stream = TokenFileStream(files, vocab_size=100)
    assert len(stream) == 100
    for start in range(0, 100, 7):
        for stop in range(start, 101, 3):
            tokens = stream.read(start, stop)
            assert tokens.dtype == np.int64
            assert tokens.tolist() == list(range(start, stop))


@pytest.mark.parametrize(("start", "stop"), [(-1, 3), (5, 4), (99, 101)])
def test_refuses_tokens_outside(shards: Path, start: int, stop: int):
    with pytest.raises(IndexError, match="outside"):
        TokenFileStream(token_files(config(shards)), vocab_size=100).read(start, stop)


@pytest.mark.parametrize("dtype", ["uint16", "uint32", "int32", "int64"])
def test_bin_has_the_dtype_of_the_recipe(tmp_path: Path, dtype: str):
    np.arange(50, dtype=dtype).tofile(tmp_path / "x.bin")
    stream = TokenFileStream(token_files(config(tmp_path / "x.bin", token_dtype=dtype)), vocab_size=50)
    assert stream.read(0, 50).tolist() == list(range(50))


def test_more_shards_than_are_mapped_at_once(tmp_path: Path):
    for i in range(150):
        np.full(2, i, dtype=np.uint16).tofile(tmp_path / f"{i:03}.bin")
    stream = TokenFileStream(token_files(config(tmp_path)), vocab_size=150)
    assert stream.read(0, 300).tolist() == [i // 2 for i in range(300)]
    assert stream.read(1, 3).tolist() == [0, 1]


@pytest.mark.parametrize("suffix", [".bin", ".npy"])
def test_a_gigabyte_is_mapped_and_not_read(tmp_path: Path, suffix: str):
    path = tmp_path / f"big{suffix}"
    num_tokens = 2**29
    if suffix == ".npy":
        np.lib.format.open_memmap(path, mode="w+", dtype=np.uint16, shape=(num_tokens,)).flush()
    with path.open("ab") as file:
        file.truncate(path.stat().st_size if suffix == ".npy" else 2 * num_tokens)
    assert path.stat().st_size >= 2**30
    tracemalloc.start()
    stream = TokenFileStream(token_files(config(path)), vocab_size=10)
    stream.probe()
    assert stream.read(num_tokens - 5, num_tokens).tolist() == [0] * 5
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(stream) == num_tokens
    assert peak_bytes < 4_000_000


@pytest.mark.parametrize("bad", [-1, 100])
def test_a_strange_id_is_named_with_its_place(tmp_path: Path, bad: int):
    ids = np.arange(100, dtype=np.int64)
    np.save(tmp_path / "good.npy", ids)
    ids[42] = bad
    np.save(tmp_path / "wrong.npy", ids)
    stream = TokenFileStream(token_files(config(tmp_path)), vocab_size=100)
    assert stream.read(0, 142)[-1] == 41
    with pytest.raises(
        ConfigError, match=rf"wrong.npy holds id {bad} at token 42, but .*model.vocab_size=100; raise it"
    ):
        stream.read(140, 150)
    with pytest.raises(ConfigError, match=f"holds id {bad} at token 42"):
        stream.probe()


def test_probe_looks_at_all_of_data_that_is_not_huge(tmp_path: Path):
    ids = np.zeros(5 * 2**14 + 3, dtype=np.uint16)
    for place in (0, 2**14 - 1, 3 * 2**14 + 1, len(ids) - 1):
        ids[:] = 0
        ids[place] = 9
        np.save(tmp_path / "x.npy", ids)
        with pytest.raises(ConfigError, match=f"holds id 9 at token {place},"):
            TokenFileStream(token_files(config(tmp_path)), vocab_size=9).probe()


def test_bin_of_a_wrong_length_is_refused(tmp_path: Path):
    (tmp_path / "x.bin").write_bytes(b"12345")
    with pytest.raises(
        ConfigError, match="x.bin has 5 bytes, which is not a multiple of the 2 bytes of data.token_dtype=uint16"
    ):
        token_files(config(tmp_path / "x.bin"))


@pytest.mark.parametrize(
    ("array", "reason"),
    [
        (np.zeros(4, dtype=np.float32), "holds float32, but token ids are integers"),
        (np.zeros(4, dtype=bool), "holds bool, but token ids are integers"),
        (np.zeros((2, 3), dtype=np.int64), r"has shape \[2, 3\], but token ids are one row"),
        (np.array(5), r"has shape \[\], but token ids are one row"),
    ],
)
def test_npy_of_a_wrong_kind_is_refused(tmp_path: Path, array: np.ndarray, reason: str):
    np.save(tmp_path / "x.npy", array)
    with pytest.raises(ConfigError, match=f"x.npy {reason}"):
        token_files(config(tmp_path / "x.npy"))


def test_npy_that_is_cut_off_or_something_else_is_refused(tmp_path: Path):
    path = tmp_path / "x.npy"
    np.save(path, np.arange(1000))
    whole = path.read_bytes()
    for content in (whole[:-1], whole[:100], whole[:5], b"", b"hello there, no array"):
        path.write_bytes(content)
        with pytest.raises(ConfigError, match=r"x.npy is not a complete .npy array .*write it again"):
            read_npy_header(path)
    np.save(path, np.array([{}], dtype=object), allow_pickle=True)
    with pytest.raises(ConfigError, match="x.npy is not a complete .npy array"):
        read_npy_header(path)
    with path.open("wb") as file:
        np.savez(file, a=np.arange(3))
    with pytest.raises(ConfigError, match=r"x.npy is not a complete .npy array \(it is an archive of arrays"):
        read_npy_header(path)


def test_empty_and_unfitting_paths_are_refused(tmp_path: Path, text_folder: Path):
    with pytest.raises(ConfigError, match="holds no .bin or .npy file"):
        token_files(config(text_folder))
    with pytest.raises(
        ConfigError, match='a.txt must end in .bin or .npy for data.kind="tokens"; use data.kind="text"'
    ):
        token_files(config(text_folder / "a.txt"))
    (tmp_path / "x.bin").touch()
    np.save(tmp_path / "y.npy", np.zeros(0, dtype=np.int64))
    with pytest.raises(ConfigError, match=r"is empty: no token in 2 file"):
        token_files(config(tmp_path / "x.bin", tmp_path / "y.npy"))
    np.save(tmp_path / "z.npy", np.zeros(4, dtype=np.int64))
    with pytest.raises(ConfigError, match="z.npy twice"):
        token_files(config(tmp_path / "z.npy", tmp_path))


def test_sample_names_its_file_token_and_document(tmp_path: Path):
    for name, length in (("a.npy", 30), ("b.npy", 40)):
        np.save(tmp_path / name, np.zeros(length, dtype=np.uint16))
    np.array([5, 20, 40], dtype="<i8").tofile(tmp_path / "b.ends")
    stream = TokenFileStream(token_files(config(tmp_path)), vocab_size=4, is_indexed=True)
    source = PackedSamples(stream, 8, document_end=1)
    # The first has no index.
    assert source.origin(2) == f"{tmp_path / 'a.npy'}, token 16"
    # Sample 6 begins at token 48 of both, 18 of the second, whose documents end before tokens 5, 20 and 40.
    assert source.origin(6) == f"{tmp_path / 'b.npy'}, token 18, document 1"
    assert [stream.describe_location(30 + token)[-1] for token in (0, 4, 5, 19, 20)] == list("00112")


@pytest.mark.parametrize("is_indexed", [True, False])
@pytest.mark.parametrize("spoil", ["stale", "cut", "no index"])
def test_describing_a_sample_never_raises(tmp_path: Path, is_indexed: bool, spoil: str):
    np.save(tmp_path / "a.npy", np.zeros(40, dtype=np.uint16))
    ends = tmp_path / "a.ends"
    np.array([5, 30 if spoil == "stale" else 40], dtype="<i8").tofile(ends)
    file = TokenFile(tmp_path / "a.npy", 40, None, "tokens/a.npy")
    stream = TokenFileStream((file,), vocab_size=4, is_indexed=is_indexed)
    if spoil == "cut":
        assert stream.describe_location(16).endswith("document 1") == is_indexed
        os.truncate(ends, 8)
    elif spoil == "no index":
        ends.write_bytes(b"some text")
    assert PackedSamples(stream, 8).origin(2) == f"{tmp_path / 'a.npy'}, token 16"
