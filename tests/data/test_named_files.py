"""Test files whose names look like a pattern, a URL or a chain of file systems."""

import gzip
import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from moefold.bounded_read import read_text
from moefold.config.sections.data import DataConfig
from moefold.data.fingerprint import fingerprint
from moefold.data.hf_tokenizer.tokenizer_folder import JsonTokenizer
from moefold.data.input_paths import existing_path
from moefold.data.source_listing import conversation_files, settings_files
from moefold.data.sources.huggingface import text_tables
from moefold.data.sources.text_source import text_corpus
from moefold.data.token_file import token_files
from moefold.data.token_stream import TokenFileStream
from moefold.recipe import load_config
from moefold.remote_copy import local_copy
from moefold.remote_path import RemotePath

pa = pytest.importorskip("pyarrow")
pytest.importorskip("pyarrow.parquet")

NAMES = {
    "train[1]": "train1",
    "a*": "ab",
    "a?b": "axb",
    "simplecache::b": "b",
    "a::file:": "a",
    "a#b": "a",
    "a%20b": "a b",
    "a b": "a%20b",
    "it's": "its",
    'say "q"': "say q",
    "a\nb": "a",
    os.fsdecode(b"caf\xe9"): "cafe",
    "{a,b}": "a",
}
"""Odd names, each with the name of a neighbour that a library may take for it."""


def _parquet(path: Path, text: str) -> None:
    with path.open("wb") as file:
        pa.parquet.write_table(pa.table({"text": [text]}), file)


def _arrow(path: Path, text: str) -> None:
    table = pa.table({"text": [text]})
    with path.open("wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table)


def _saved(path: Path, text: str) -> None:
    path.mkdir()
    _arrow(path / "data-00000-of-00001.arrow", text)
    (path / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}))


def _folder(path: Path, text: str) -> None:
    path.mkdir()
    _parquet(path / f"{path.name}.parquet", text)


def _text(path: Path, text: str) -> None:
    path.write_text(text)


def _tokenizer(path: Path, text: str) -> None:
    path.mkdir()
    vocabulary = {text: 0, "[UNK]": 1}
    model = {"type": "WordLevel", "vocab": vocabulary, "unk_token": "[UNK]"}
    (path / "tokenizer.json").write_text(json.dumps({"version": "1.0", "added_tokens": [], "model": model}))


def _rows(path: Path) -> str:
    tables = text_tables(DataConfig(kind="huggingface", path=str(path)), "train")
    return "".join(text for text, _ in tables.documents(None))


def _tokens(path: Path) -> str:
    (file,) = token_files(DataConfig(kind="tokens", path=str(path)))
    return bytes(TokenFileStream((file,), vocab_size=256).read(0, file.num_tokens).astype(np.uint8)).decode()


def _chunks(path: Path) -> str:
    return "".join(chunk.text for chunk in text_corpus(str(path)).chunks())


def _conversations(path: Path) -> str:
    (file,) = conversation_files(DataConfig(kind="sft", path=str(path)))
    return str(json.loads(file.read_text())["text"])


def _remote_file(path: Path) -> str:
    local_copy.cache_clear()
    return existing_path("data.path", f"file://{path}").read_text()


def _template(path: Path) -> str:
    ((_, file),) = settings_files(DataConfig(kind="sft", chat_template=str(path)))
    return file.read_text()


KINDS: dict[str, tuple[Callable[[Path, str], None], Callable[[Path], str]]] = {
    # suffix: how a file with a text is written, and how its text is read
    ".parquet": (_parquet, _rows),
    ".arrow": (_arrow, _rows),
    ".csv": (lambda path, text: _text(path, f"text\n{text}\n"), _rows),
    ".tsv": (lambda path, text: _text(path, f"n\ttext\n1\t{text}\n"), _rows),
    ".json": (lambda path, text: _text(path, json.dumps([{"text": text}])), _rows),
    ".jsonl": (lambda path, text: _text(path, json.dumps({"text": text})), _rows),
    ".jsonl.gz": (lambda path, text: path.write_bytes(gzip.compress(json.dumps({"text": text}).encode())), _rows),
    "-saved": (_saved, _rows),
    "-folder": (_folder, _rows),
    ".txt": (_text, _chunks),
    ".npy": (lambda path, text: np.save(path, np.frombuffer(text.encode(), np.uint8).astype(np.uint16)), _tokens),
    ".bin": (lambda path, text: path.write_bytes(text.encode("utf-16-le")), _tokens),
    "-sft.jsonl": (lambda path, text: _text(path, json.dumps({"text": text})), _conversations),
    "-tokenizer": (_tokenizer, lambda path: JsonTokenizer(path).decode([0])),
    ".jinja": (_text, _template),
    ".toml": (lambda path, text: _text(path, f'[run]\ndir = "{text}"\n'), lambda path: load_config(path).run.dir),
    "-remote": (_text, _remote_file),
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_file_that_is_named_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write, read = KINDS[kind]
    for number, (name, decoy) in enumerate(NAMES.items()):
        for folder in (name, decoy):
            place = tmp_path / str(number) / folder
            place.mkdir(parents=True)
            for file in (name, decoy):
                write(place / f"{file}{kind}", "wanted" if name == folder == file else "decoy")
        assert read(tmp_path / str(number) / name / f"{name}{kind}") == "wanted", name


@pytest.mark.parametrize("name", NAMES)
def test_a_folder_with_odd_names_inside_has_all_of_its_files(tmp_path: Path, name: str):
    folder = tmp_path / name
    (folder / name).mkdir(parents=True)
    for number, place in enumerate((folder, folder / name)):
        _parquet(place / f"{name}.parquet", f"{number}")
    assert sorted(_rows(folder)) == ["0", "1"]
    data = DataConfig(kind="huggingface", path=str(folder))
    assert json.loads(json.dumps(fingerprint(data))) == fingerprint(data)


@pytest.mark.parametrize("name", [name for name in NAMES if name.isprintable()])
def test_remote_operations_on_several_files_take_names_literally(tmp_path: Path, name: str):
    decoy = NAMES[name]
    for scheme in ("memory", "file"):
        root = RemotePath(f"{scheme}://{tmp_path}/remote")
        for folder in (name, decoy):
            (root / folder / "in" / "x").write_bytes(folder.encode())
        assert sorted(entry.name for entry in root.entries()) == sorted((name, decoy))
        (root / name / "in" / "x").rename(root / name / "y")
        assert (root / name / "y").read_bytes() == name.encode()
        assert list((root / name).files()) == ["y"]
        (root / name).delete_tree()
        assert not (root / name).exists()
        assert (root / decoy / "in" / "x").read_bytes() == decoy.encode()
        root.delete_tree()


def test_a_chain_of_file_systems_is_a_name(tmp_path: Path):
    (tmp_path / "secret").write_text("secret")
    chained = RemotePath(f"memory://a::file://{tmp_path}/secret")
    assert not chained.exists()
    assert read_text(RemotePath(f"file://{tmp_path}/secret"), 100) == "secret"
