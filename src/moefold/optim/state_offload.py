"""Optimizer-state offload: moments in host memory or on SSD between steps (`train.offload_optimizer`).

A step processes one parameter after the other. While one is updated, the moments of the next are copied to the device
and the moments of the last are copied back. So the device holds the moments of three parameters at a time.
"""

import math
import mmap
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from moefold.errors import ConfigError
from moefold.message_text import first_line
from moefold.model.local_param import local_tensor
from moefold.offload.backend import CopyEngine
from moefold.optim.states import StateStore
from moefold.units import format_bytes


class PinnedStore(StateStore):
    """Store in pinned host memory.

    Args:
        min_bytes: moments smaller than this on this rank stay on the device.
    """

    def __init__(self, copy_engine: CopyEngine, min_bytes: int) -> None:
        self._copy_engine = copy_engine
        self._min_bytes = min_bytes
        self._meshes: dict[DeviceMesh, DeviceMesh] = {}

    def zeros(self, like: Tensor, dtype: torch.dtype) -> Tensor:
        """Allocate a moment. It raises ConfigError if there is not enough memory."""
        shard = local_tensor(like)
        num_bytes = shard.numel() * dtype.itemsize
        if num_bytes < max(self._min_bytes, 1):
            return super().zeros(like, dtype)
        local = self._allocate(num_bytes).view(dtype).view(shard.shape)
        if not isinstance(like, DTensor):
            return local
        # A DTensor is on the device of its mesh, so offloaded DTensors need a host mesh with the same ranks and groups.
        mesh = self._host_mesh(like.device_mesh)
        layout = (like.shape, like.stride())
        return DTensor.from_local(local, mesh, like.placements, run_check=False, shape=layout[0], stride=layout[1])

    def is_offloaded(self, moment: Tensor) -> bool:
        """See base class."""
        return local_tensor(moment).device.type != self._copy_engine.device.type

    def prefetch(self, moments: Sequence[Sequence[Tensor]]) -> Iterator[list[Tensor]]:
        """See base class."""
        fetched = self._fetch_all(moments[0]) if moments else []
        pending: list[_PendingWriteback] = []
        for i, moments_of_param in enumerate(moments):
            on_device = fetched
            fetched = self._fetch_all(moments[i + 1]) if i + 1 < len(moments) else []
            for _, event in on_device:
                self._copy_engine.wait_event(event)
            yield [moment for moment, _ in on_device]
            # The device has this update in its queue, so the previous write-backs have had time to finish.
            self._finish_write_backs(pending)
            pending = [
                self._write_back(x, local_tensor(stored))
                for stored, (x, _) in zip(moments_of_param, on_device, strict=True)
            ]
            if self._copy_engine.device.type == "cpu":
                self._finish_write_backs(pending)
                pending = []
        self._finish_write_backs(pending)

    def _allocate(self, num_bytes: int) -> Tensor:
        try:
            return self._copy_engine.allocate_host(num_bytes).zero_()
        except RuntimeError as error:
            reason = first_line(error)
            raise ConfigError(
                f"train.offload_optimizer='host' cannot allocate {format_bytes(num_bytes)} more on the host "
                f"({reason}); choose 'ssd', or more ranks"
            ) from None

    def _fetch_all(self, moments: Sequence[Tensor]) -> list[tuple[Tensor, object]]:
        return [self._fetch(local_tensor(moment)) for moment in moments]

    def _fetch(self, host: Tensor) -> tuple[Tensor, object]:
        if host.device.type == self._copy_engine.device.type:
            return host, None
        on_device = (
            self._copy_engine.allocate_device(host.numel() * host.element_size()).view(host.dtype).view(host.shape)
        )
        return on_device, self._copy_engine.to_device_async(host, on_device, self._copy_engine.record_event())

    def _write_back(self, on_device: Tensor, host: Tensor) -> "_PendingWriteback":
        if on_device.data_ptr() == host.data_ptr():
            return _PendingWriteback(on_device, host, None)
        return _PendingWriteback(
            on_device, host, self._copy_engine.to_host_async(on_device, self._copy_engine.record_event(), host)
        )

    def _finish_write_backs(self, pending: list["_PendingWriteback"]) -> None:
        for write_back in pending:
            self._copy_engine.synchronize(write_back.done_event)

    def _host_mesh(self, mesh: DeviceMesh) -> DeviceMesh:
        if self._copy_engine.device.type == "cpu":
            return mesh
        if mesh not in self._meshes:
            self._meshes[mesh] = host_mesh(mesh)
        return self._meshes[mesh]


class MmapStore(PinnedStore):
    """Store in memory-mapped, unnamed files on a local disk, which disappear with the process.

    Each file is allocated in full when it is created, so a full disk is detected then. Written pages are dropped from
    the memory of the process. The kernel writes them to disk when it needs the memory.

    Args:
        folder: folder on the disk, created if needed.
        min_bytes: see `PinnedStore`.
    """

    def __init__(self, copy_engine: CopyEngine, folder: Path, min_bytes: int) -> None:
        super().__init__(copy_engine, min_bytes)
        self._folder = folder
        self._mmaps: dict[int, mmap.mmap] = {}

    def is_offloaded(self, moment: Tensor) -> bool:
        """See base class."""
        return local_tensor(moment).data_ptr() in self._mmaps

    def zero(self, moment: Tensor) -> None:
        """See base class."""
        super().zero(moment)
        self._drop_pages(local_tensor(moment))

    def _allocate(self, num_bytes: int) -> Tensor:
        length = math.ceil(num_bytes / mmap.PAGESIZE) * mmap.PAGESIZE
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self._folder, prefix="moefold-") as file:
                os.posix_fallocate(file.fileno(), 0, length)
                mapped = mmap.mmap(file.fileno(), length)
        except OSError as error:
            raise ConfigError(
                f"train.offload_optimizer='ssd' cannot allocate {format_bytes(length)} more in "
                f"train.offload_dir={str(self._folder)!r} ({error.strerror}); choose another folder, or 'none'"
            ) from None
        buffer = torch.frombuffer(mapped, dtype=torch.uint8, count=num_bytes)
        self._mmaps[buffer.data_ptr()] = mapped
        return buffer

    def _finish_write_backs(self, pending: list["_PendingWriteback"]) -> None:
        super()._finish_write_backs(pending)
        for write_back in pending:
            self._drop_pages(write_back.host)

    def _drop_pages(self, host: Tensor) -> None:
        if mapped := self._mmaps.get(host.data_ptr()):
            # For a shared file mapping this drops only the pages of the process, not the content.
            mapped.madvise(mmap.MADV_DONTNEED)


@dataclass(frozen=True, slots=True)
class _PendingWriteback:
    """A moment that is being copied back to its store."""

    on_device: Tensor
    """Kept alive until the copy is done."""
    host: Tensor
    done_event: Any
    """Event of the copy."""


def states_on_device(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    """Return the optimizer state that is on the device between steps."""
    state_store = getattr(optimizer, "state_store", StateStore())
    return (x for state in optimizer.state.values() for x in state.values() if not state_store.is_offloaded(x))


def host_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Return a mesh of the same ranks and groups for host tensors. It creates no group.

    Such tensors can be read, written and sharded. To communicate them, copy them to the device first.
    """
    groups = mesh.get_all_groups()
    names = mesh.mesh_dim_names
    if len(groups) == 1:
        return DeviceMesh.from_group(groups[0], "cpu", mesh_dim_names=names)
    return DeviceMesh.from_group(groups, "cpu", mesh=mesh.mesh, mesh_dim_names=names)
