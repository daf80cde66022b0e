"""Digests computed while a file is written equal the digests of the file read back."""

import hashlib

import pytest
import torch
import torch.distributed.checkpoint as dcp

from moefold.checkpoint.hashed_files import MAX_WAITING_BYTES, HashingThread
from moefold.checkpoint.manifest import digest_file
from moefold.checkpoint.streaming_io import ReusedMemory, TensorChunk, write_chunks


def test_a_thread_hashes_blocks_in_order_however_many_wait():
    sizes = [MAX_WAITING_BYTES // 3 if i % 3 else 10 for i in range(12)]
    blocks = [bytes([i]) * size for i, size in enumerate(sizes)] + [b"", b"x" * (MAX_WAITING_BYTES + 1)]
    digests = [hashlib.sha256(), hashlib.sha256()]
    with HashingThread() as thread:
        for i, block in enumerate(blocks):
            thread.update(digests[i % 2], block)
    expected = [hashlib.sha256(b"".join(blocks[i::2])).hexdigest() for i in range(2)]
    assert [digest.hexdigest() for digest in digests] == expected


@pytest.mark.parametrize("has_cuda", [False, True])
def test_digests_of_written_files_equal_the_digests_of_the_files_read_back(tmp_path, monkeypatch, has_cuda):
    """Where torch has CUDA, DCP reads tensors ahead through a stream of the GPU, unless it is told not to."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_cuda)
    memory = ReusedMemory()
    values = {"one": torch.randn(300, 700), "two": torch.randn(5).bfloat16()}
    chunks = [TensorChunk("one", 0, 100), TensorChunk("one", 100, 300), TensorChunk("two", 0, 5)]

    def read(chunk):
        part = values[chunk.name][chunk.start : chunk.stop]
        return memory.empty(part.shape, part.dtype).copy_(part)

    digests = write_chunks(
        tmp_path,
        {name: tuple(value.shape) for name, value in values.items()},
        {name: value.dtype for name, value in values.items()},
        chunks,
        read,
    )
    files = sorted(tmp_path.glob("*.distcp"))
    assert files
    assert digests == {file.name: digest_file(file) for file in files}
    found = {name: torch.zeros_like(value) for name, value in values.items()}
    dcp.load({f"model.{name}": value for name, value in found.items()}, checkpoint_id=tmp_path, no_dist=True)
    assert all(torch.equal(found[name], value) for name, value in values.items())
