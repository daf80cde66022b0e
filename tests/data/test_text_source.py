"""Text files are read as documents in a fixed order without the loss of a byte; unreadable ones are named."""

import io
from pathlib import Path

import pytest

from moefold.data.sources.text_source import CHUNK_BYTES, Corpus, TextChunk, python_docs_corpus, text_corpus
from moefold.errors import ConfigError


def documents(corpus: Corpus) -> list[str]:
    texts, text = [], ""
    for piece in corpus.chunks():
        text += piece.text
        if piece.ends_document:
            texts.append(text)
            text = ""
    assert text == ""
    return texts


def test_each_file_is_a_document_in_a_fixed_order(text_folder: Path):
    expected = [(text_folder / name).read_text(encoding="utf-8") for name in ("a.txt", "b.txt", "inner/c.txt")]
    assert documents(text_corpus(str(text_folder))) == expected
    named = (str(text_folder / "inner"), str(text_folder / "a.txt"))
    assert documents(text_corpus(named)) == [expected[2], expected[0]]


def test_a_long_document_comes_in_pieces_that_end_at_lines(tmp_path: Path):
    text = "".join(f"line {i} ☃\n" + ("\n  indented\n" if i % 5 == 0 else "") for i in range(250_000))
    (tmp_path / "long.txt").write_text(text, encoding="utf-8")
    pieces = list(text_corpus(str(tmp_path)).chunks())
    assert len(pieces) > 3
    assert "".join(piece.text for piece in pieces) == text
    assert [piece.ends_document for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    for piece, following in zip(pieces, pieces[1:], strict=False):
        assert piece.text.endswith(("☃\n", "d\n"))
        assert following.text.startswith("line")
    assert sum(piece.size_bytes for piece in pieces) == len(text.encode())


@pytest.mark.parametrize("size", [CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 2 * CHUNK_BYTES])
def test_no_byte_is_lost_without_line_ends(tmp_path: Path, size: int):
    (tmp_path / "x.txt").write_text("é" * (size // 2) + "x" * (size % 2), encoding="utf-8")
    assert documents(text_corpus(str(tmp_path))) == ["é" * (size // 2) + "x" * (size % 2)]


def test_a_byte_order_mark_is_not_text_and_an_empty_file_is_not_a_document(tmp_path: Path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfhello")
    (tmp_path / "b.txt").write_bytes(b"")
    (tmp_path / "c.txt").write_bytes(b"\xef\xbb\xbf")
    (tmp_path / "d.txt").write_bytes(b"world\r\n")
    assert documents(text_corpus(str(tmp_path))) == ["hello", "world\r\n"]


@pytest.mark.parametrize(
    "lead", [b"", b"\xef\xbb\xbf", b"a" * (CHUNK_BYTES + 5), b"a" * (CHUNK_BYTES - 1) + "é".encode()]
)
def test_text_that_is_not_utf8_is_named_with_its_byte(tmp_path: Path, lead: bytes):
    (tmp_path / "latin.txt").write_bytes(lead + "naïve".encode("latin1"))
    with pytest.raises(ConfigError, match=rf"latin.txt is not UTF-8 text \(byte {len(lead) + 2}: .*; convert it"):
        documents(text_corpus(str(tmp_path)))


def test_utf16_is_refused_and_not_taken_for_a_picture(tmp_path: Path):
    (tmp_path / "wide.txt").write_text("hello", encoding="utf-16")
    with pytest.raises(ConfigError, match="wide.txt is not UTF-8 text"):
        documents(text_corpus(str(tmp_path)))


def test_other_files_of_a_folder_are_left_out_with_a_message(text_folder: Path, caplog: pytest.LogCaptureFixture):
    (text_folder / "picture.png").write_bytes(b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR")
    assert len(documents(text_corpus(str(text_folder)))) == 3
    assert "left out" in caplog.text
    assert "picture.png" in caplog.text


def test_a_named_file_is_never_left_out(text_folder: Path):
    (text_folder / "picture.png").write_bytes(b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR")
    with pytest.raises(ConfigError, match="picture.png is not text: it holds zero bytes"):
        documents(text_corpus(str(text_folder / "picture.png")))


def test_a_folder_without_files_and_empty_files_are_refused(tmp_path: Path):
    (tmp_path / "deep" / "deeper").mkdir(parents=True)
    with pytest.raises(ConfigError, match="holds no text file"):
        text_corpus(str(tmp_path))
    (tmp_path / "deep" / "empty.txt").touch()
    with pytest.raises(ConfigError, match="is empty; name files with text"):
        text_corpus(str(tmp_path))


def test_a_file_reached_twice_is_refused(text_folder: Path):
    with pytest.raises(ConfigError, match="reaches .*a.txt twice"):
        text_corpus((str(text_folder), str(text_folder / "a.txt")))


def test_a_file_that_vanishes_is_named(text_folder: Path):
    corpus = text_corpus(str(text_folder))
    (text_folder / "b.txt").unlink()
    with pytest.raises(ConfigError, match="b.txt is not readable"):
        documents(corpus)


def test_identity_changes_with_the_text(text_folder: Path):
    before = text_corpus(str(text_folder)).identity
    assert before == text_corpus(str(text_folder)).identity
    with (text_folder / "a.txt").open("a") as file:
        file.write("more")
    assert before != text_corpus(str(text_folder)).identity


def test_python_docs_are_topics_then_sources():
    corpus = python_docs_corpus()
    texts = documents(corpus)
    assert len(texts) > 200
    assert texts[0].startswith('The "assert" statement')
    names = [file.path.name for file in corpus.files]
    assert names[0] == "topics.py"
    assert "argparse.py" in names
    assert not {"site-packages", "test", "encodings"} & {part for file in corpus.files for part in file.path.parts}
    assert sum(map(len, texts)) > 3_000_000
    assert corpus.files == python_docs_corpus().files


def test_pieces_are_lazy(text_folder: Path):
    first = next(iter(text_corpus(str(text_folder)).chunks()))
    assert isinstance(first, TextChunk)
    assert first.text == io.StringIO((text_folder / "a.txt").read_text(encoding="utf-8")).read()
