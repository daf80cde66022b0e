"""Token files of Megatron and of llm.c."""

import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from moefold.config.sections.data import DataConfig
from moefold.data.token_file import open_document_ends, token_files
from moefold.data.token_stream import TokenFileStream
from moefold.errors import ConfigError

LENGTHS = (300, 1, 700, 500, 900, 20)
DOCUMENTS = (0, 1, 3, 4, 6)
"""First sequences of four documents, and the number of sequences."""


def _sequences(dtype: str) -> list[np.ndarray]:
    rng = np.random.default_rng(3)
    return [rng.integers(0, 120, size=length).astype(dtype) for length in LENGTHS]


def _write_megatron(folder: Path, code: int, dtype: str, documents: tuple[int, ...] = DOCUMENTS) -> Path:
    """Write a data set as Megatron-Core's IndexedDatasetBuilder does and return the .bin."""
    parts = _sequences(dtype)
    path = folder / "corpus_text_document.bin"
    path.write_bytes(b"".join(part.tobytes() for part in parts))
    starts = np.cumsum([0, *(part.nbytes for part in parts[:-1])])
    head = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, code, len(parts), len(documents))
    body = np.array(LENGTHS, "<i4").tobytes() + starts.astype("<i8").tobytes() + np.array(documents, "<i8").tobytes()
    path.with_suffix(".idx").write_bytes(head + body)
    return path


def _read(path: Path, **keys: object) -> np.ndarray:
    files = token_files(replace(DataConfig(), kind="tokens", path=str(path), **keys))
    stream = TokenFileStream(files, vocab_size=1000)
    return stream.read(0, len(stream))


@pytest.mark.parametrize(("code", "dtype"), [(1, "u1"), (2, "i1"), (3, "<i2"), (4, "<i4"), (5, "<i8"), (8, "<u2")])
def test_ids_of_megatron_have_the_dtype_of_the_index(tmp_path, code, dtype):
    path = _write_megatron(tmp_path, code, dtype)
    assert np.array_equal(_read(path, token_dtype="uint32"), np.concatenate(_sequences(dtype)))
    assert np.array_equal(_read(tmp_path), np.concatenate(_sequences(dtype)))


def test_documents_of_megatron_are_the_documents_of_the_index(tmp_path):
    path = _write_megatron(tmp_path, 4, "<i4")
    total = sum(LENGTHS)
    ends = open_document_ends(path, total)
    assert len(ends) == 4
    assert ends.between(0, total + 1).tolist() == [300, 1001, 1501, 2421]
    assert [ends.document_of(token) for token in (0, 299, 300, 1000, 1001, 2420)] == [0, 0, 1, 1, 2, 3]
    files = token_files(replace(DataConfig(), kind="tokens", path=str(path)))
    stream = TokenFileStream(files, vocab_size=1000, is_indexed=True)
    assert np.flatnonzero(stream.document_starts(0, total)).tolist() == [0, 300, 1001, 1501]


@pytest.mark.parametrize(
    ("magic", "version", "dtype"), [(20240520, 1, "<u2"), (20240801, 7, "<u4")], ids=["gpt-2", "llama-3"]
)
def test_the_header_of_llm_c_is_read(tmp_path, magic, version, dtype):
    ids = np.arange(500).astype(dtype)
    header = np.zeros(256, "<i4")
    header[:3] = magic, version, len(ids)
    (tmp_path / "a.bin").write_bytes(header.tobytes() + ids.tobytes())
    assert np.array_equal(_read(tmp_path / "a.bin"), ids)
    (tmp_path / "a.bin").write_bytes(header.tobytes() + ids.tobytes()[:-8])
    with pytest.raises(ConfigError, match=r"a\.bin has the header of llm\.c with 500 ids .* copy the file again"):
        _read(tmp_path / "a.bin")


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-4])


def _cut_index(path: Path) -> None:
    path.with_suffix(".idx").write_bytes(path.with_suffix(".idx").read_bytes()[:-1])


def _other_index(path: Path) -> None:
    path.with_suffix(".idx").write_bytes(b"TNTIDX\x00\x00" + bytes(100))


def _float_ids(path: Path) -> None:
    found = bytearray(path.with_suffix(".idx").read_bytes())
    found[17] = 6
    path.with_suffix(".idx").write_bytes(found)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_truncate, "is the index of a file with 9684; copy both again"),
        (_cut_index, "bytes; copy it again"),
        (_other_index, r"is not an index of Megatron \(MMIDIDX\).*move it away"),
        (_float_ids, "has version 1 and ids of type 6"),
    ],
)
def test_a_broken_data_set_of_megatron_is_refused(tmp_path, damage, message):
    path = _write_megatron(tmp_path, 4, "<i4")
    damage(path)
    with pytest.raises(ConfigError, match=message):
        _read(path)


def test_an_index_whose_documents_do_not_ascend_is_refused(tmp_path):
    path = _write_megatron(tmp_path, 4, "<i4", (0, 3, 1, 4, 6))
    with pytest.raises(ConfigError, match="it does not ascend"):
        open_document_ends(path, sum(LENGTHS))


@pytest.mark.parametrize("documents", [(1, 2, 3, 4, 6), (0, 1, 3, 4, 9)], ids=["first", "last"])
def test_an_index_with_other_sequences_than_its_documents_is_refused(tmp_path, documents):
    path = _write_megatron(tmp_path, 4, "<i4", documents)
    with pytest.raises(ConfigError, match="its documents are not the sequences 0 to 6"):
        open_document_ends(path, sum(LENGTHS))


@pytest.mark.parametrize("field", ["length", "offset"])
@pytest.mark.parametrize("documents", [DOCUMENTS, (0, 6)], ids=["four", "one"])
def test_an_index_whose_sequences_leave_a_gap_is_refused(tmp_path, field, documents):
    path = _write_megatron(tmp_path, 4, "<i4", documents)
    index = path.with_suffix(".idx")
    whole = index.read_bytes()
    for sequence in range(5):
        content = bytearray(whole)
        # Lengths begin after 34 bytes, offsets after the lengths.
        start, kind = (34 + 4 * sequence, "<i4") if field == "length" else (34 + 4 * 6 + 8 * sequence, "<i8")
        number = np.frombuffer(content, kind, 1, start) + 1
        content[start : start + number.nbytes] = number.tobytes()
        index.write_bytes(content)
        with pytest.raises(ConfigError, match=r"its sequences do not follow each other in the \.bin"):
            _read(path)
        with pytest.raises(ConfigError, match=r"its sequences do not follow each other in the \.bin"):
            open_document_ends(path, sum(LENGTHS))


def test_an_index_without_the_first_sequence_of_the_file_is_refused(tmp_path):
    path = _write_megatron(tmp_path, 4, "<i4", (0, 1))
    head = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 4, 1, 2)
    body = np.array([20], "<i4").tobytes() + np.array([4 * 2401, 0, 1], "<i8").tobytes()
    path.with_suffix(".idx").write_bytes(head + body)
    for read in (_read, lambda path: open_document_ends(path, sum(LENGTHS))):
        with pytest.raises(ConfigError, match=r"its sequences do not follow each other in the \.bin"):
            read(path)


@pytest.mark.parametrize("part", [1, 2, 3])
def test_gaps_are_found_between_the_parts_of_an_index(tmp_path, monkeypatch, part):
    monkeypatch.setattr("moefold.data.token_file._INDEX_PART", part)
    path = _write_megatron(tmp_path, 4, "<i4")
    assert np.array_equal(_read(path), np.concatenate(_sequences("<i4")))
    content = bytearray(path.with_suffix(".idx").read_bytes())
    for sequence in range(1, 6):
        moved = bytearray(content)
        # Two sequences in the other order: lengths and end of the file are the same.
        for start, size in ((34, 4), (34 + 4 * 6, 8)):
            a = slice(start + size * (sequence - 1), start + size * sequence)
            b = slice(start + size * sequence, start + size * (sequence + 1))
            moved[a], moved[b] = content[b], content[a]
        path.with_suffix(".idx").write_bytes(moved)
        with pytest.raises(ConfigError, match="do not follow each other|is the index of a file with"):
            _read(path)


@pytest.mark.parametrize(
    ("dtype", "read_as"), [("<u4", "uint16"), ("<i4", "uint16"), ("<i8", "uint16"), ("<i8", "uint32"), ("<i8", "int32")]
)
def test_bare_ids_of_a_wider_type_are_refused(tmp_path, dtype, read_as):
    ids = np.random.default_rng(4).integers(0, 260_000, size=3000)
    (tmp_path / "a.bin").write_bytes(ids.astype(dtype).tobytes())
    with pytest.raises(ConfigError, match=rf"in every second place of data\.token_dtype={read_as}"):
        _read(tmp_path / "a.bin", token_dtype=read_as)
    files = token_files(
        DataConfig(kind="tokens", path=str(tmp_path), token_dtype="int64" if dtype == "<i8" else "uint32")
    )
    assert np.array_equal(TokenFileStream(files, vocab_size=260_000).read(0, 3000), ids)


def test_bare_ids_with_many_small_ones_are_read(tmp_path):
    ids = np.random.default_rng(5).integers(0, 9, size=3000).astype("<u2")
    (tmp_path / "a.bin").write_bytes(ids.tobytes())
    assert np.array_equal(_read(tmp_path / "a.bin"), ids)
