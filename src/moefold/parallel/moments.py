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
from moefold.metrics.bytes_text import bytes_text
from moefold.model.parameter import local_values
from moefold.offload.tier import Link


class MomentHome:
    """Where moments live, and how a step gets at them. This one: on the device, beside the weights."""

    def zeros(self, like: Tensor, dtype: torch.dtype) -> Tensor:
        """A moment of a parameter, cut as it is."""
        return torch.zeros_like(like, dtype=dtype)

    def is_away(self, moment: Tensor) -> bool:
        """Whether a moment is outside of the device's memory between steps."""
        return False

    def visit(self, moments: Sequence[Sequence[Tensor]]) -> Iterator[list[Tensor]]:
        """The moments of one parameter after the other, as local tensors on the device, to be changed in place.

        What was changed is home when the iteration has come to its end.
        """
        for of_one in moments:
            yield [local_values(moment) for moment in of_one]


class HostHome(MomentHome):
    """In page-locked memory of the host, or wherever `_room` puts them.

    Args:
        link: to the device.
        min_bytes: the moments of a parameter that has less of each on this rank stay on the device.
    """

    def __init__(self, link: Link, min_bytes: int) -> None:
        self._link = link
        self._min_bytes = min_bytes
        self._meshes: dict[DeviceMesh, DeviceMesh] = {}

    def zeros(self, like: Tensor, dtype: torch.dtype) -> Tensor:
        """See `MomentHome.zeros`; raises ConfigError where there is no room."""
        here = local_values(like)
        num_bytes = here.numel() * dtype.itemsize
        if num_bytes < max(self._min_bytes, 1):
            return super().zeros(like, dtype)
        local = self._room(num_bytes).view(dtype).view(here.shape)
        if not isinstance(like, DTensor):
            return local
        # A DTensor is where its mesh is, so those on the host have a mesh of their own: the same ranks and groups.
        mesh, whole = self._mesh(like.device_mesh), (like.shape, like.stride())
        return DTensor.from_local(local, mesh, like.placements, run_check=False, shape=whole[0], stride=whole[1])

    def is_away(self, moment: Tensor) -> bool:
        """See `MomentHome.is_away`."""
        return local_values(moment).device.type != self._link.device.type

    def visit(self, moments: Sequence[Sequence[Tensor]]) -> Iterator[list[Tensor]]:
        """See `MomentHome.visit`."""
        ahead = self._begin(moments[0]) if moments else []
        leaving: list[_Leaving] = []
        for i, of_one in enumerate(moments):
            here, ahead = ahead, self._begin(moments[i + 1]) if i + 1 < len(moments) else []
            for _, arrived in here:
                self._link.wait(arrived)
            yield [on_device for on_device, _ in here]
            # The device has been told of this update: those of the one before had the time of telling to leave.
            self._settle(leaving)
            leaving = [self._leave(x, local_values(home)) for home, (x, _) in zip(of_one, here, strict=True)]
            if self._link.device.type == "cpu":
                self._settle(leaving)
                leaving = []
        self._settle(leaving)

    def _room(self, num_bytes: int) -> Tensor:
        try:
            return self._link.room_on_host(num_bytes).zero_()
        except RuntimeError as error:
            reason = str(error).partition("\n")[0]
            raise ConfigError(
                f"train.offload_optimizer='host' finds no room for {bytes_text(num_bytes)} more on the host "
                f"({reason}); choose 'ssd', or more ranks"
            ) from None

    def _begin(self, of_one: Sequence[Tensor]) -> list[tuple[Tensor, object]]:
        return [self._fetch(local_values(moment)) for moment in of_one]

    def _fetch(self, host: Tensor) -> tuple[Tensor, object]:
        if host.device.type == self._link.device.type:
            return host, None
        on_device = self._link.room_on_device(host.numel() * host.element_size()).view(host.dtype).view(host.shape)
        return on_device, self._link.to_device(host, on_device, self._link.mark())

    def _leave(self, on_device: Tensor, host: Tensor) -> "_Leaving":
        if on_device.data_ptr() == host.data_ptr():
            return _Leaving(on_device, host, None)
        return _Leaving(on_device, host, self._link.begin_to_host(on_device, self._link.mark(), host))

    def _settle(self, leaving: list["_Leaving"]) -> None:
        for one in leaving:
            self._link.wait_on_host(one.left)

    def _mesh(self, mesh: DeviceMesh) -> DeviceMesh:
        if self._link.device.type == "cpu":
            return mesh
        if mesh not in self._meshes:
            self._meshes[mesh] = host_mesh(mesh)
        return self._meshes[mesh]


class FileHome(HostHome):
    """In files on a local disk that are mapped into memory; they have no name and go with the process.

    Each is written in full when it is made, so that a disk without room says so then. What a step has changed leaves
    the memory of the process, and the kernel writes it out and drops it as it needs the memory.

    Args:
        link: to the device.
        folder: on the disk; made if there is none.
        min_bytes: see `HostHome`.
    """

    def __init__(self, link: Link, folder: Path, min_bytes: int) -> None:
        super().__init__(link, min_bytes)
        self._folder = folder
        self._maps: dict[int, mmap.mmap] = {}

    def is_away(self, moment: Tensor) -> bool:
        """See `MomentHome.is_away`."""
        return local_values(moment).data_ptr() in self._maps

    def _room(self, num_bytes: int) -> Tensor:
        length = math.ceil(num_bytes / mmap.PAGESIZE) * mmap.PAGESIZE
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self._folder, prefix="moefold-") as file:
                os.posix_fallocate(file.fileno(), 0, length)
                mapped = mmap.mmap(file.fileno(), length)
        except OSError as error:
            raise ConfigError(
                f"train.offload_optimizer='ssd' finds no room for {bytes_text(length)} more in "
                f"train.offload_dir={str(self._folder)!r} ({error.strerror}); choose another folder, or 'none'"
            ) from None
        room = torch.frombuffer(mapped, dtype=torch.uint8, count=num_bytes)
        self._maps[room.data_ptr()] = mapped
        return room

    def _settle(self, leaving: list["_Leaving"]) -> None:
        super()._settle(leaving)
        for one in leaving:
            if mapped := self._maps.get(one.host.data_ptr()):
                # Of a shared mapping of a file this drops no content, only the pages from the memory of the process.
                mapped.madvise(mmap.MADV_DONTNEED)


@dataclass(frozen=True, slots=True)
class _Leaving:
    """A moment on its way home."""

    on_device: Tensor
    """Held until it is there."""
    host: Tensor
    left: Any
    """What to wait for."""


def states_in_memory(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    """What an optimizer has in the device's memory between steps."""
    home = getattr(optimizer, "home", MomentHome())
    return (x for state in optimizer.state.values() for x in state.values() if not home.is_away(x))


def host_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The same ranks and groups, for tensors that are in memory of the host; makes no group.

    Such tensors are read, written and cut; to send them, bring them to the device first.
    """
    groups, names = mesh.get_all_groups(), mesh.mesh_dim_names
    if len(groups) == 1:
        return DeviceMesh.from_group(groups[0], "cpu", mesh_dim_names=names)
    return DeviceMesh.from_group(groups, "cpu", mesh=mesh.mesh, mesh_dim_names=names)
