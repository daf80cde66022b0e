"""Arrays, indexes and tokenizers of a stranger's making: one message for whoever reads them, and nothing is run."""

import json
import os
import pickle
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from moefold.config.sections.data import DataConfig
from moefold.data.dataset import DataRequest
from moefold.data.routing_trace import FORMAT, MANIFEST, RoutingTrace
from moefold.data.shard_reader import map_npy
from moefold.data.token_file import open_document_ends
from moefold.data.validate_source import check_data
from moefold.errors import ConfigError
from moefold.inference.token_dataset import open_ids


class Runs:
    """A pickle of it makes a file when it is read."""

    def __init__(self, trace: Path) -> None:
        self.command = f"touch {trace}"

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, (self.command,)


def header(shape: str, descr: str = "'<u2'") -> bytes:
    text = f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text


def objects(trace: Path) -> bytes:
    file = trace.with_name("objects.npy")
    np.save(file, np.array([Runs(trace)], dtype=object), allow_pickle=True)
    return file.read_bytes()


def archive(trace: Path) -> bytes:
    file = trace.with_name("archive.npz")
    np.savez(file, ids=np.arange(4))
    return file.read_bytes()


STRANGE: dict[str, Callable[[Path], bytes]] = {
    "objects": objects,
    "pickle": lambda trace: pickle.dumps(Runs(trace)),
    "call in header": lambda trace: header("(4,)", f"__import__('os').system('touch {trace}')"),
    "object type": lambda _: header("(4,)", "'|O'"),
    "2**60 ids": lambda _: header(f"({2**60},)"),
    "2**70 ids": lambda _: header(f"({2**70},)"),
    "less than none": lambda _: header("(-5,)"),
    "deep header": lambda _: header("(" * 5000),
    "true": lambda _: header("(True,)") + bytes(64),
    "list": lambda _: header("[4]") + bytes(64),
    "cut off": lambda _: header("(400,)") + bytes(64),
    "archive": archive,
    "broken archive": lambda _: b"PK\x03\x04" + bytes(50),
    "empty": lambda _: b"",
}


def trace_step(file: Path) -> object:
    shape = {"layers": [0], "num_experts": 4, "top_k": 2, "global_batch_size": 1, "seq_len": 16}
    (file.parent / MANIFEST).write_text(json.dumps({"format": FORMAT, **shape}))
    file.rename(file.with_name("step-000001.npy"))
    return RoutingTrace(file.parent, "moe.replay").step(1)


READERS: dict[str, Callable[[Path], object]] = {
    "train": lambda file: check_data(
        DataRequest(DataConfig(kind="tokens", path=str(file)), seq_len=16, vocab_size=256, seed=0)
    ),
    "eval": open_ids,
    "replay": trace_step,
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("kind", STRANGE)
def test_a_strange_array_is_one_message(tmp_path, kind, reader):
    trace = tmp_path / "it-ran"
    file = tmp_path / "ids.npy"
    file.write_bytes(STRANGE[kind](trace))
    with pytest.raises(ConfigError) as error:
        READERS[reader](file)
    assert "\n" not in str(error.value)
    assert not trace.exists()


def test_a_plain_array_is_mapped(tmp_path):
    np.save(tmp_path / "a.npy", np.arange(5, dtype=np.uint16))
    assert map_npy(tmp_path / "a.npy").tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("ends", [[-1, 20], [2**62, 20], [10], [20, 10, 20]])
def test_a_strange_index_of_documents_is_one_message(tmp_path, ends):
    np.array(ends, dtype="<i8").tofile(tmp_path / "ids.ends")
    with pytest.raises(ConfigError, match="is not an index of the 20 tokens"):
        open_document_ends(tmp_path / "ids.npy", 20)


@pytest.mark.parametrize(
    "manifest", ["[" * 100_000, '{"format": "moefold-routing-1", "seq_len": 1e400}', "[]", '{"format": 1e400}', ""]
)
def test_a_strange_trace_is_one_message(tmp_path, manifest):
    (tmp_path / MANIFEST).write_text(manifest)
    with pytest.raises(ConfigError, match=f"has a {MANIFEST} that is no"):
        RoutingTrace(tmp_path, "moe.replay")


TOKENIZERS = {
    "deep": '{"a":' * 100_000,
    "large id": {"model": {"type": "BPE", "vocab": {"a": 2**32}, "merges": []}},
    "merge of nothing": {"model": {"type": "BPE", "vocab": {"a": 0}, "merges": [["a", "b"]]}},
    "2**32 ids": {"model": {"type": "WordLevel", "vocab": {"a": 2**32 - 1}, "unk_token": "a"}},
    "panics": {
        "normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"},
        "model": {"type": "WordLevel", "vocab": {"a": 1}, "unk_token": "a"},
    },
    "fails on text": {"model": {"type": "WordLevel", "vocab": {"a": 1}, "unk_token": "nowhere"}},
}


@pytest.mark.parametrize("kind", [*TOKENIZERS, "pickle"])
def test_a_strange_tokenizer_is_one_message(tmp_path, kind):
    trace = tmp_path / "it-ran"
    (tmp_path / "text.txt").write_text("some words " * 50)
    content = TOKENIZERS.get(kind, "")
    text = content if isinstance(content, str) else json.dumps({"version": "1.0", "added_tokens": [], **content})
    file = tmp_path / "tokenizer.json"
    file.write_bytes(pickle.dumps(Runs(trace)) if kind == "pickle" else text.encode())
    data = DataConfig(kind="text", path=str(tmp_path / "text.txt"), tokenizer=str(file), validation_fraction=0.0)
    with pytest.raises(ConfigError, match="tokenizer") as error:
        DataRequest(data, seq_len=8, vocab_size=256, seed=0).prepare()
    assert "\n" not in str(error.value)
    assert not trace.exists()
