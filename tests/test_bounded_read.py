"""Files, JSON, TOML and lines are read up to a limit, in time proportional to their size."""

import io
import tomllib
from pathlib import Path

import pytest

from moefold import bounded_read
from moefold.bounded_read import (
    bounded_lines,
    format_json,
    have_same_content,
    parse_json,
    parse_toml,
    read_bytes,
    read_json,
    read_text,
)


def test_a_file_is_read_up_to_its_limit(tmp_path: Path):
    file = tmp_path / "x"
    file.write_bytes(b"a\r\nb\rc\n")
    assert read_bytes(file, 7) == b"a\r\nb\rc\n"
    assert read_text(file, 7) == "a\nb\nc\n"
    with pytest.raises(OSError, match="^it has more than the 6 bytes that such a file may have$"):
        read_bytes(file, 6)
    # Files of the system say that they are empty.
    with pytest.raises(OSError, match="more than the 5 bytes"):
        read_bytes(Path("/proc/self/status"), 5)


def test_json_of_too_many_levels_or_values_is_refused(monkeypatch: pytest.MonkeyPatch):
    assert parse_json(b"\xef\xbb\xbf" + b"[" * 100 + b"]" * 100)
    for text in ("[" * 101 + "]" * 101, "[" * 100_000):
        with pytest.raises(ValueError, match="deeper than 100 levels"):
            parse_json(text)
    monkeypatch.setattr(bounded_read, "MAX_JSON_VALUES", 4)
    assert parse_json('{"a, [b\\", c": ",,,,,,,,", "d": 1}')
    with pytest.raises(ValueError, match="more than 4 values"):
        parse_json("[1,2,3,4,5]")


@pytest.mark.parametrize(
    "text",
    ["a = " + "[" * 5000, "a = " + "9" * 5000, ".".join("a" * 100_000) + " = 1", '"a b".' * 100_000 + "c = 1"],
)
def test_toml_of_too_many_levels_or_digits_is_refused(text: str):
    with pytest.raises(tomllib.TOMLDecodeError):
        parse_toml(text)


@pytest.mark.parametrize("text", ["a" * 10**6, '"\\' * 500_000, "a = '" + "." * 10**6, "a " * 500_000])
def test_toml_that_is_long_takes_time_in_proportion(text: str):
    """A text that would take the square of its length if tried from each place; the parser itself refuses it."""
    with pytest.raises(tomllib.TOMLDecodeError, match="^(?!a key has more)"):
        parse_toml(text)


def test_lines_are_read_up_to_a_limit():
    assert list(bounded_lines(io.BytesIO(b"ab\n\nc"), 3)) == [b"ab\n", b"\n", b"c"]
    with pytest.raises(ValueError, match="line 2 is longer than 3 bytes"):
        list(bounded_lines(io.BytesIO(b"a\nbcde"), 3))


def test_files_with_the_same_content(tmp_path: Path):
    one, other = tmp_path / "one", tmp_path / "other"
    one.write_bytes(b"x" * 2**21)
    other.write_bytes(b"x" * 2**21)
    assert have_same_content(one, other)
    other.write_bytes(b"x" * (2**21 - 1) + b"y")
    assert not have_same_content(one, other)
    with pytest.raises(ValueError, match="Expecting value"):
        read_json(one, 2**21)


def _nested(levels: int) -> list[object]:
    document: list[object] = []
    for _ in range(levels - 1):
        document = [document]
    return document


def test_written_files_can_be_read(tmp_path: Path):
    file = tmp_path / "x.json"
    for document in ({"a": [1, "é", None]}, _nested(100)):
        file.write_text(format_json(document, 1 << 20))
        assert read_json(file, 1 << 20) == document
    assert format_json([1, 2], 20) == "[\n  1,\n  2\n]\n"
    # Without spaces where the limit asks for it.
    assert format_json([1, 2], 6) == "[1,2]\n"
    with pytest.raises(ValueError, match="^it has 6 bytes, and 5 can be read$"):
        format_json([1, 2], 5)
    for levels in (101, 50_000):
        with pytest.raises(ValueError, match="^it is nested deeper than 100 levels$"):
            format_json(_nested(levels), 1 << 20)
