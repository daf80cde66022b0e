"""A file on a local disk for bytes that memory is too small for; nothing is left of it when the process ends."""

import math
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from moefold.errors import ConfigError, RunError
from moefold.offload.extents import Extent, FileAllocator
from moefold.offload.tier import CopyEngine


@dataclass(frozen=True)
class _StoredExtent:
    """Bytes in the file."""

    extent: Extent
    num_bytes: int
    checksum: int


class SsdFile:
    """One file without a name, in which extents are written and read where they lie.

    It never has a name where the file system can do without (O_TMPFILE), else a random one that is removed at once: it
    is the owner's alone, and gone with the process, however that ends. Every extent has a checksum, so that a file that
    was cut or a disk that forgets ends the run instead of making a gradient.

    Args:
        copy_engine: to the device.
        folder: on the disk; made if there is none.
        limit_bytes: largest size of the file.

    Raises:
        ConfigError: there can be no file in that folder.
    """

    def __init__(self, copy_engine: CopyEngine, folder: Path, limit_bytes: float = math.inf) -> None:
        self.copy_engine = copy_engine
        self.name = f"train.offload_dir={str(folder)!r}"
        self._allocator = FileAllocator(limit_bytes)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = tempfile.TemporaryFile(dir=folder, prefix="moefold-", buffering=0)  # noqa: SIM115
        except OSError as error:
            raise ConfigError(f"{self.name} cannot be written: {error.strerror}; choose another") from None

    def store(self, data: Tensor, ready: Any) -> _StoredExtent | None:
        """See `Tier.store`."""
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
        """See `Tier.load`."""
        is_cpu = self.copy_engine.device.type == "cpu"
        host = out if is_cpu else self.copy_engine.allocate_host(stored.num_bytes)
        self._read(host, stored.extent.start)
        if checksum(host) != stored.checksum:
            raise RunError(f"{self.name}: what was offloaded is not what was written; the disk or the file is damaged")
        return None if is_cpu else self.copy_engine.to_device_async(host, out, ready)

    def _write(self, host: Tensor, offset: int) -> None:
        rest = host.numpy().data
        while rest:
            count = os.pwrite(self._file.fileno(), rest, offset)
            rest, offset = rest[count:], offset + count

    def _read(self, host: Tensor, offset: int) -> None:
        rest = host.numpy().data
        while rest:
            try:
                count = os.preadv(self._file.fileno(), [rest], offset)
            except OSError as error:
                raise RunError(f"{self.name}: what was offloaded cannot be read back: {error.strerror}") from error
            if count == 0:
                raise RunError(f"{self.name}: the file of what was offloaded was cut: it ends before byte {offset + 1}")
            rest, offset = rest[count:], offset + count


def checksum(host: Tensor) -> int:
    """Sum of 64-bit words modulo 2**64, as fast as memory: for bytes that are lost or zeroed, not for an adversary."""
    num_words = host.numel() // 8
    words, rest = host.numpy()[: 8 * num_words].view(np.uint64), host.numpy()[8 * num_words :]
    return (int(np.add.reduce(words, dtype=np.uint64)) + int(rest.astype(np.uint64).sum())) % 2**64
