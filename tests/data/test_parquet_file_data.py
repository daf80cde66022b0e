"""Columns of parquet files: a damaged one is named with its file and its row."""

from pathlib import Path

import pytest

pytest.importorskip("pyarrow", reason="pyarrow comes with the extra `hf`")
import pyarrow
import pyarrow.parquet

from moefold.data.sources.file_formats import column_values, open_parquet
from moefold.errors import ConfigError


def write(path: Path, texts: list[bytes]) -> Path:
    """A file of row groups of ten, whose texts need not be UTF-8."""
    column = pyarrow.array(texts, type=pyarrow.binary()).view(pyarrow.string())
    pyarrow.parquet.write_table(pyarrow.table({"text": column}), path, row_group_size=10, compression="NONE")
    return path


def test_rows_are_numbered_through_the_groups(tmp_path: Path):
    path = write(tmp_path / "a.parquet", [b"t%d" % i for i in range(35)])
    assert list(column_values(path, "text")) == [(i + 1, f"t{i}") for i in range(35)]
    assert list(column_values(path, "text", [2, 3])) == [(i + 1, f"t{i}") for i in range(20, 35)]


def test_a_text_that_is_not_utf8_is_named_with_its_row(tmp_path: Path):
    path = write(tmp_path / "a.parquet", [b"fine", b"fine", *[b"x"] * 20, b"bad \xff", b"fine"])
    with pytest.raises(ConfigError, match=r"a.parquet: column 'text' holds no UTF-8 in row 23 .*at byte 4.*fix"):
        list(column_values(path, "text", [2]))


def test_damage_is_named_with_the_rows_before_it(tmp_path: Path):
    path = write(tmp_path / "a.parquet", [b"t%d" % i for i in range(35)])
    start = open_parquet(path).metadata.row_group(2).column(0).dictionary_page_offset
    content = bytearray(path.read_bytes())
    content[start : start + 4] = b"\xff" * 4
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"a.parquet is damaged after row 20 .*; copy it again or leave it out"):
        list(column_values(path, "text", [2]))
    path.write_bytes(content[:-7])
    with pytest.raises(ConfigError, match="a.parquet is not a complete parquet file"):
        open_parquet(path)
