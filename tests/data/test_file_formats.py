"""Objects of JSON lines, gzip and parquet files come with their places; damaged files are named."""

import bz2
import gzip
import lzma
from functools import partial
from pathlib import Path

import pytest

from moefold.config.sections.data import DataConfig
from moefold.data.input_paths import COMPRESSION_SUFFIXES, is_jsonl
from moefold.data.sft import conversation_files
from moefold.data.sources.file_formats import column_text, jsonl_records
from moefold.data.tokenize_job import ShardWriter, tokenize_files
from moefold.errors import ConfigError


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_objects_with_their_places(tmp_path: Path, name: str):
    path = write(tmp_path / name, '\ufeff{"text": "é"}\n\n  \n{"n": [1]}'.encode())
    records = list(jsonl_records(path))
    assert [record.fields for record in records] == [{"text": "é"}, {"n": [1]}]
    assert [record.location for record in records] == [f"{path}:1", f"{path}:4"]
    assert is_jsonl(path)


@pytest.mark.parametrize("suffix", COMPRESSION_SUFFIXES)
def test_compressed_lines_in_a_folder_are_read_by_each_kind_of_data(tmp_path: Path, suffix: str):
    pyarrow = pytest.importorskip("pyarrow")
    packs = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress}
    packs[".zst"] = partial(pyarrow.compress, codec="zstd", asbytes=True)
    folder = tmp_path / "rows"
    folder.mkdir()
    (folder / "a.jsonl").write_bytes(b'{"text": "a"}')
    path = folder / f"b.jsonl{suffix}"
    path.write_bytes(packs[suffix](b'{"text": "b"}\n{"text": "c"}'))
    (folder / "c.txt").write_bytes(b"d")
    assert [file.name for file in conversation_files(DataConfig(kind="sft", path=str(folder)))] == [
        "a.jsonl",
        path.name,
    ]
    writer = ShardWriter(tmp_path / "out", "bytes", "text")
    done = tokenize_files([str(path)], writer, input_format="auto", shard_bytes=8, num_processes=1)
    assert (done.num_documents, done.num_tokens) == (2, 4)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b'{"a": oops}', ":2 is not JSON"),
        (b'{"a": 1', ":2 is not JSON"),
        (b"[1, 2]", ":2 holds a list"),
        (b'{"a": "\xff"}', ":2 is not UTF-8"),
        (b"[" * 100_000, ":2 is not JSON"),
        (b'{"a": ' + b"1" * 5000 + b"}", ":2 is not JSON"),
    ],
)
def test_a_broken_line_is_named(tmp_path: Path, line: bytes, words: str):
    path = write(tmp_path / "a.jsonl", b'{"a": 1}\n' + line + b'\n{"a": 2}\n')
    with pytest.raises(ConfigError, match=words) as error:
        list(jsonl_records(path))
    assert str(path) in str(error.value)


def test_a_gzip_file_that_is_cut_is_refused(tmp_path: Path):
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"a": 1}\n' * 1000)[:-10])
    with pytest.raises(ConfigError, match="not a complete gzip file"):
        list(jsonl_records(path))


@pytest.mark.parametrize("place", [0, 5, 14, 40, -6, -2])
def test_a_damaged_gzip_file(tmp_path: Path, place: int):
    path = write(tmp_path / "a.jsonl.gz", b"".join(b'{"a": %d}\n' % (i * i) for i in range(300)))
    content = bytearray(path.read_bytes())
    content[place] ^= 0xFF
    path.write_bytes(content)
    # Not every byte of the header matters.
    if place != 5:
        with pytest.raises(ConfigError, match=r"a.jsonl.gz(:\d+ is not JSON| is not a complete gzip file)"):
            list(jsonl_records(path))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"txt": "a"}, "no column 'text'; did you mean 'txt'"),
        ({"alpha": 1, "beta": 2}, "the columns are 'alpha', 'beta'"),
        ({"text": None}, "holds null, not text"),
        ({"text": 3}, "holds a number, not text"),
        ({"text": "\ud800"}, "not Unicode"),
    ],
)
def test_a_column_that_is_not_text(fields: dict, words: str):
    with pytest.raises(ConfigError, match=words):
        column_text(fields, "text", "f:1")
