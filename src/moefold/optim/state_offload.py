"""Moments of the optimizer that live outside of the device's memory between steps (`train.offload_optimizer`).

A step visits them one parameter after the other: while one is updated, the moments of the next come to the device and
those of the one before go back, so that the device holds those of three parameters at a time.
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
from moefold.model.local_param import local_tensor
from moefold.offload.backend import CopyEngine
from moefold.terminal import format_bytes


class StateStore:
    """Where moments live, and how a step gets at them. This one: on the device, beside the weights."""

    def zeros(self, like: Tensor, dtype: torch.dtype) -> Tensor:
        """A moment of a parameter, cut as it is."""
        return torch.zeros_like(like, dtype=dtype)

    def is_offloaded(self, moment: Tensor) -> bool:
        """Whether a moment is outside of the device's memory between steps."""
        return False

    def prefetch(self, moments: Sequence[Sequence[Tensor]]) -> Iterator[list[Tensor]]:
        """The moments of one parameter after the other, as local tensors on the device, to be changed in place.

        What was changed is home when the iteration has come to its end.
        """
        for of_one in moments:
            yield [local_tensor(moment) for moment in of_one]


class PinnedStore(StateStore):
    """In page-locked memory of the host, or wherever `_allocate` puts them.

    Args:
        copy_engine: to the device.
        min_bytes: the moments of a parameter that has less of each on this rank stay on the device.
    """

    def __init__(self, copy_engine: CopyEngine, min_bytes: int) -> None:
        self._copy_engine = copy_engine
        self._min_bytes = min_bytes
        self._meshes: dict[DeviceMesh, DeviceMesh] = {}

    def zeros(self, like: Tensor, dtype: torch.dtype) -> Tensor:
        """See `StateStore.zeros`; raises ConfigError where there is no room."""
        here = local_tensor(like)
        num_bytes = here.numel() * dtype.itemsize
        if num_bytes < max(self._min_bytes, 1):
            return super().zeros(like, dtype)
        local = self._allocate(num_bytes).view(dtype).view(here.shape)
        if not isinstance(like, DTensor):
            return local
        # A DTensor is where its mesh is, so those on the host have a mesh of their own: the same ranks and groups.
        mesh = self._host_mesh(like.device_mesh)
        whole = (like.shape, like.stride())
        return DTensor.from_local(local, mesh, like.placements, run_check=False, shape=whole[0], stride=whole[1])

    def is_offloaded(self, moment: Tensor) -> bool:
        """See `StateStore.is_away`."""
        return local_tensor(moment).device.type != self._copy_engine.device.type

    def prefetch(self, moments: Sequence[Sequence[Tensor]]) -> Iterator[list[Tensor]]:
        """See `StateStore.visit`."""
        ahead = self._fetch_all(moments[0]) if moments else []
        leaving: list[_PendingWriteback] = []
        for i, of_one in enumerate(moments):
            here = ahead
            ahead = self._fetch_all(moments[i + 1]) if i + 1 < len(moments) else []
            for _, arrived in here:
                self._copy_engine.wait_event(arrived)
            yield [on_device for on_device, _ in here]
            # The device has been told of this update: those of the one before had the time of telling to leave.
            self._finish_write_backs(leaving)
            leaving = [self._write_back(x, local_tensor(home)) for home, (x, _) in zip(of_one, here, strict=True)]
            if self._copy_engine.device.type == "cpu":
                self._finish_write_backs(leaving)
                leaving = []
        self._finish_write_backs(leaving)

    def _allocate(self, num_bytes: int) -> Tensor:
        try:
            return self._copy_engine.allocate_host(num_bytes).zero_()
        except RuntimeError as error:
            reason = str(error).partition("\n")[0]
            raise ConfigError(
                f"train.offload_optimizer='host' finds no room for {format_bytes(num_bytes)} more on the host "
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
        for one in pending:
            self._copy_engine.synchronize(one.done_event)

    def _host_mesh(self, mesh: DeviceMesh) -> DeviceMesh:
        if self._copy_engine.device.type == "cpu":
            return mesh
        if mesh not in self._meshes:
            self._meshes[mesh] = host_mesh(mesh)
        return self._meshes[mesh]


class MmapStore(PinnedStore):
    """In files on a local disk that are mapped into memory; they have no name and go with the process.

    Each is written in full when it is made, so that a disk without room says so then. What a step has changed leaves
    the memory of the process, and the kernel writes it out and drops it as it needs the memory.

    Args:
        copy_engine: to the device.
        folder: on the disk; made if there is none.
        min_bytes: see `PinnedStore`.
    """

    def __init__(self, copy_engine: CopyEngine, folder: Path, min_bytes: int) -> None:
        super().__init__(copy_engine, min_bytes)
        self._folder = folder
        self._mmaps: dict[int, mmap.mmap] = {}

    def is_offloaded(self, moment: Tensor) -> bool:
        """See `StateStore.is_away`."""
        return local_tensor(moment).data_ptr() in self._mmaps

    def _allocate(self, num_bytes: int) -> Tensor:
        length = math.ceil(num_bytes / mmap.PAGESIZE) * mmap.PAGESIZE
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self._folder, prefix="moefold-") as file:
                os.posix_fallocate(file.fileno(), 0, length)
                mapped = mmap.mmap(file.fileno(), length)
        except OSError as error:
            raise ConfigError(
                f"train.offload_optimizer='ssd' finds no room for {format_bytes(length)} more in "
                f"train.offload_dir={str(self._folder)!r} ({error.strerror}); choose another folder, or 'none'"
            ) from None
        room = torch.frombuffer(mapped, dtype=torch.uint8, count=num_bytes)
        self._mmaps[room.data_ptr()] = mapped
        return room

    def _finish_write_backs(self, pending: list["_PendingWriteback"]) -> None:
        super()._finish_write_backs(pending)
        for one in pending:
            if mapped := self._mmaps.get(one.host.data_ptr()):
                # Of a shared mapping of a file this drops no content, only the pages from the memory of the process.
                mapped.madvise(mmap.MADV_DONTNEED)


@dataclass(frozen=True, slots=True)
class _PendingWriteback:
    """A moment on its way home."""

    on_device: Tensor
    """Held until it is there."""
    host: Tensor
    done_event: Any
    """What to wait for."""


def states_on_device(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    """What an optimizer has in the device's memory between steps."""
    home = getattr(optimizer, "state_store", StateStore())
    return (x for state in optimizer.state.values() for x in state.values() if not home.is_offloaded(x))


def host_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The same ranks and groups, for tensors that are in memory of the host; makes no group.

    Such tensors are read, written and cut; to send them, bring them to the device first.
    """
    groups = mesh.get_all_groups()
    names = mesh.mesh_dim_names
    if len(groups) == 1:
        return DeviceMesh.from_group(groups[0], "cpu", mesh_dim_names=names)
    return DeviceMesh.from_group(groups, "cpu", mesh=mesh.mesh, mesh_dim_names=names)
