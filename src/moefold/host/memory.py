"""Memory of this machine that is available (free memory and swap, control groups, limits), and this process's peak."""

import os
import resource
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from moefold.units import GIB

ROOT = Path("/")
_PROCESS_STATUS = Path("/proc/self/status")
UNLIMITED_BYTES = 2**62
"""Limits above this mean no limit: cgroup version 1 writes a number near 2**63."""


@dataclass(frozen=True, slots=True)
class AvailableMemory:
    """Available bytes, and their limiting factor."""

    size: int
    description: str
    """Text for a message: "21.3 GiB are free"."""


def physical_bytes() -> int:
    """Return the physical memory of this machine."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def available_host_memory(root: Path = ROOT) -> AvailableMemory:
    """Return the memory that all processes of this machine or container together can still allocate.

    The minimum of MemAvailable and the headroom of this process's control groups, each plus free swap. File caches
    count as free. Without /proc (macOS) it is all memory of the machine.
    """
    free_bytes = _free_bytes(root)
    swap = 0
    if free_bytes is None:
        return AvailableMemory(physical_bytes(), "of the machine")
    available, swap = free_bytes
    limits = [AvailableMemory(available + swap, "free on this machine" + (", swap included" if swap else ""))]
    limits += [
        AvailableMemory(headroom + swap, "left by the memory limit of the control group")
        for headroom in _cgroup_headrooms(root)
    ]
    return min(limits, key=lambda limit: limit.size)


def available_process_memory(root: Path = ROOT) -> AvailableMemory | None:
    """Return the bytes that this process can still map under its limit (`ulimit -v`), or None without a limit."""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit == resource.RLIM_INFINITY:
        return None
    return AvailableMemory(max(0, limit - _mapped_bytes(root)), "left by the limit of address space (ulimit -v)")


def _free_bytes(root: Path) -> tuple[int, int] | None:
    """Return MemAvailable and SwapFree, or None if the kernel does not report them."""
    try:
        lines = (root / "proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    kib = {name: int(value.split()[0]) for name, _, value in (line.partition(":") for line in lines) if value.strip()}
    return (kib["MemAvailable"] * 1024, kib.get("SwapFree", 0) * 1024) if "MemAvailable" in kib else None


def _mapped_bytes(root: Path) -> int:
    try:
        pages = int((root / "proc/self/statm").read_text(encoding="ascii").split()[0])
    except OSError:
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def _cgroup_headrooms(root: Path) -> Iterator[int]:
    """Yield the headroom of each control group of this process, version 1 and 2."""
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            names = ("memory.max", "memory.current", "inactive_file")
            mounts = [root / "sys/fs/cgroup", root / "sys/fs/cgroup/unified"]
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            mounts = [root / "sys/fs/cgroup/memory"]
        else:
            continue
        for mount in mounts:
            # In a container the path may be the host's. Then the mount itself is the group.
            folder = mount / path.lstrip("/")
            folders = [folder, *folder.parents]
            for group in folders[: folders.index(mount) + 1]:
                yield from _cgroup_headroom(group, *names)


def _cgroup_headroom(group: Path, limit_file: str, usage_file: str, cache_key: str) -> Iterator[int]:
    try:
        limit_text = (group / limit_file).read_text(encoding="ascii").strip()
        usage = int((group / usage_file).read_text(encoding="ascii"))
        stat = dict(line.split(" ", 1) for line in (group / "memory.stat").read_text(encoding="ascii").splitlines())
    except (OSError, ValueError):
        return
    if limit_text.isdecimal() and int(limit_text) < UNLIMITED_BYTES:
        yield max(0, int(limit_text) - usage + int(stat.get(cache_key, "0")))


def peak_resident_gib() -> float:
    """Return the peak resident set of this process in GiB, with code and libraries (about 0.3 GiB for torch).

    Linux reports it as VmHWM in /proc. Elsewhere it comes from `getrusage`, where a child process inherits its parent's
    peak.
    """
    if _PROCESS_STATUS.exists():
        for line in _PROCESS_STATUS.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024 / GIB
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    peak_bytes = peak if sys.platform == "darwin" else peak * 1024
    return peak_bytes / GIB
