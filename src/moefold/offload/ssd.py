"""SSD backend: offloaded bytes in an unnamed file on a local disk, with an allocator of its extents."""

import math
import os
import tempfile
import threading
from bisect import insort
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from moefold.errors import ConfigError, RunError
from moefold.offload.backend import CopyEngine

ALIGNMENT_BYTES = 4096
"""Alignment of every extent: the block size of file systems and the page size of memory."""

ByteRange = tuple[int, int]


class Extent:
    """Bytes [start, stop) of the file, which are freed when this object is garbage-collected."""

    __slots__ = ("_freed", "start", "stop")

    def __init__(self, start: int, stop: int, freed: deque[ByteRange]) -> None:
        self.start = start
        self.stop = stop
        self._freed = freed

    def __del__(self) -> None:
        # May run in any thread, even in a thread that holds the lock; deque.append needs no lock.
        self._freed.append((self.start, self.stop))


class FileAllocator:
    """Best-fit allocator of extents of a file, thread-safe.

    Args:
        limit_bytes: end of the last possible extent.
    """

    def __init__(self, limit_bytes: float = math.inf) -> None:
        self._limit_bytes = limit_bytes
        self._end = 0
        self._free_ranges: list[ByteRange] = []
        self._freed: deque[ByteRange] = deque()
        self._lock = threading.Lock()

    @property
    def end(self) -> int:
        """End of the last extent."""
        with self._lock:
            self._reclaim()
            return self._end

    def allocate(self, num_bytes: int) -> Extent | None:
        """Allocate an extent of at least `num_bytes` >= 1 bytes. Return None if there is not enough space."""
        num_bytes = -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        with self._lock:
            self._reclaim()
            spans = (*self._free_ranges, (self._end, self._end + num_bytes))
            fits = [span for span in spans if span[0] + num_bytes <= min(span[1], self._limit_bytes)]
            if not fits:
                return None
            start, stop = min(fits, key=lambda span: (span[0] == self._end, span[1] - span[0]))
            if start < self._end:
                self._free_ranges.remove((start, stop))
                if stop - start > num_bytes:
                    insort(self._free_ranges, (start + num_bytes, stop))
            else:
                self._end = stop
            return Extent(start, start + num_bytes, self._freed)

    def limit_to(self, offset: int) -> None:
        """Allocate no extent beyond `offset` from now on, as the file cannot grow further."""
        with self._lock:
            self._limit_bytes = min(self._limit_bytes, offset)

    def _reclaim(self) -> None:
        while self._freed:
            insort(self._free_ranges, self._freed.popleft())
        joined: list[ByteRange] = []
        for start, stop in self._free_ranges:
            if joined and joined[-1][1] == start:
                start = joined.pop()[0]
            joined.append((start, stop))
        if joined and joined[-1][1] == self._end:
            self._end = joined.pop()[0]
        self._free_ranges = joined


@dataclass(frozen=True)
class _StoredExtent:
    """An extent that holds stored bytes, with their checksum."""

    extent: Extent
    num_bytes: int
    checksum: int


class SsdFile:
    """Backend in one unnamed file, whose extents are written and read in place.

    If the file system supports it (O_TMPFILE), the file never has a name. Otherwise it has a random name that is
    removed immediately. Only its owner can access it, and it disappears when the process ends in any way. Every extent
    has a checksum, so that a truncated file or a faulty disk ends the run instead of corrupting a gradient.

    Args:
        folder: folder on the disk, created if needed.
        limit_bytes: largest size of the file.

    Raises:
        ConfigError: the file cannot be created in that folder.
    """

    def __init__(self, copy_engine: CopyEngine, folder: Path, limit_bytes: float = math.inf) -> None:
        self.copy_engine = copy_engine
        self.name = f"train.offload_dir={str(folder)!r}"
        self._allocator = FileAllocator(limit_bytes)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self.file = tempfile.TemporaryFile(dir=folder, prefix="moefold-", buffering=0)  # noqa: SIM115
        except OSError as error:
            raise ConfigError(f"{self.name} cannot be written: {error.strerror}; choose another") from None

    def store(self, data: Tensor, ready: Any) -> _StoredExtent | None:
        """See base class."""
        extent = self._allocator.allocate(data.numel())
        if extent is None:
            return None
        host = data
        if self.copy_engine.device.type != "cpu":
            host = self.copy_engine.to_host(data, ready, self.copy_engine.allocate_host(data.numel()))
        try:
            self._write(host, extent.start)
        except OSError:
            self._allocator.limit_to(extent.start)
            raise
        return _StoredExtent(extent, data.numel(), checksum(host))

    def load(self, stored: _StoredExtent, out: Tensor, ready: Any) -> Any:
        """See base class."""
        is_cpu = self.copy_engine.device.type == "cpu"
        host = out if is_cpu else self.copy_engine.allocate_host(stored.num_bytes)
        self._read(host, stored.extent.start)
        if checksum(host) != stored.checksum:
            raise RunError(
                f"{self.name}: the offloaded bytes differ from the written bytes; the disk or the file is damaged"
            )
        return None if is_cpu else self.copy_engine.to_device_async(host, out, ready)

    def _write(self, host: Tensor, offset: int) -> None:
        pending = host.numpy().data
        while pending:
            count = os.pwrite(self.file.fileno(), pending, offset)
            pending = pending[count:]
            offset = offset + count

    def _read(self, host: Tensor, offset: int) -> None:
        pending = host.numpy().data
        while pending:
            try:
                count = os.preadv(self.file.fileno(), [pending], offset)
            except OSError as error:
                raise RunError(f"{self.name}: the offloaded bytes cannot be read back: {error.strerror}") from error
            if count == 0:
                raise RunError(f"{self.name}: the offload file was truncated: it ends before byte {offset + 1}")
            pending = pending[count:]
            offset = offset + count


def checksum(host: Tensor) -> int:
    """Return the sum of 64-bit words modulo 2**64, at memory speed: detects lost or zeroed bytes, not an adversary."""
    num_words = host.numel() // 8
    words = host.numpy()[: 8 * num_words].view(np.uint64)
    tail = host.numpy()[8 * num_words :]
    return (int(np.add.reduce(words, dtype=np.uint64)) + int(tail.astype(np.uint64).sum())) % 2**64
