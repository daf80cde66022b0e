"""Small files of a checkpoint that ask for gigabytes are refused before the memory is spent."""

import io
import pickle
import resource
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo

from moefold.checkpoint.safe_metadata import check_opcodes
from moefold.checkpoint.shard_file import StoredShard, check_shards

HEAD = b"\x80\x04"
BOMBS = {
    "memo index": HEAD + b"]r" + struct.pack("<I", 2**31) + b".",
    "memo index as text": HEAD + b"]p2147483648\n.",
    "bytearray": HEAD + b"\x96" + struct.pack("<Q", 2**33) + b".",
    "long text": HEAD + b"\x8d" + struct.pack("<Q", 2**33) + b".",
    "lists": HEAD + b"]" * 2**20 + b".",
    "memo": HEAD + b"N" + b"\x94" * 2**20 + b".",
    "sets": HEAD + b"\x8f" * 1000 + b".",
    "no end": HEAD + b"N",
    "old protocol": b"\x80\x02N.",
    "zeros": bytes(1000),
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_operations_that_no_index_has_are_refused(bomb: str):
    with pytest.raises(ValueError):
        check_opcodes(BOMBS[bomb])


def test_pickles_of_the_library_pass():
    sizes = [{"n": torch.Size([i, 2**40]), "t": torch.float32, "x": ("a" * 300, None, True, -i)} for i in range(5000)]
    for protocol in (4, 5):
        check_opcodes(pickle.dumps(sizes, protocol))


def saved(values: object) -> bytes:
    file = io.BytesIO()
    torch.save(values, file)
    return file.getvalue()


def compressed(content: bytes) -> bytes:
    """The same archive, deflated; a long run of zeros takes a thousandth."""
    made = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as old, zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as new:
        for name in old.namelist():
            new.writestr(name, old.read(name))
    return made.getvalue()


def check(folder: Path, content: bytes, sizes: tuple[int, ...], dtype: torch.dtype) -> None:
    # Parts lie one after another: this one is in the middle of its file.
    (folder / "f").write_bytes(b"before" + content + b"after")
    check_shards(folder, [StoredShard("w", _StorageInfo("f", 6, len(content)), torch.Size(sizes), dtype)])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.float8_e4m3fn])
@pytest.mark.parametrize("sizes", [(), (0,), (3, 5), (2, 0, 4)])
def test_saves_of_the_library_pass(tmp_path: Path, dtype: torch.dtype, sizes: tuple[int, ...]):
    check(tmp_path, saved(torch.zeros(sizes, dtype=dtype)), sizes, dtype)


PARTS: dict[str, Callable[[], bytes]] = {
    "compressed": lambda: compressed(saved(torch.zeros(2**20))),
    "another shape": lambda: saved(torch.zeros(2**10, 2**10)),
    "another type": lambda: saved(torch.zeros(2**20, dtype=torch.float64)),
    "two tensors": lambda: saved([torch.zeros(2**20)] * 2),
    "bytearray": lambda: saved(bytearray(10)),
    "spread": lambda: saved(torch.zeros(1).expand(2**20)).replace(b"J\x00\x00\x10\x00", b"J\x00\x00\x20\x00"),
    "cut": lambda: saved(torch.zeros(2**20))[:-1],
    "junk": lambda: bytes(2**10),
}


@pytest.mark.parametrize("kind", PARTS)
def test_a_part_that_is_another_tensor_is_refused(tmp_path: Path, kind: str):
    content = PARTS[kind]()
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ValueError, match="file f holds something else where w belongs"):
        check(tmp_path, content, (2**20,), torch.float32)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib < 2**16
