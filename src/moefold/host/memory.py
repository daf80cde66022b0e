"""Memory that this machine can still give: free memory and swap, control groups, limits of the process. Torch-free."""

import os
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path("/")
UNLIMITED_BYTES = 2**62
"""Version 1 of control groups writes a number near 2**63 for no limit."""


@dataclass(frozen=True, slots=True)
class AvailableMemory:
    """Bytes, and what limits them."""

    size: int
    description: str
    """For a message: "21.3 GiB are free"."""


def physical_bytes() -> int:
    """Return the physical memory of this machine."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def available_host_memory(root: Path = ROOT) -> AvailableMemory:
    """Return what all processes of this machine, or of this container, can still get together.

    That is MemAvailable plus free swap, and not more than the control groups of this process leave, to which free swap
    is added as well. File caches count as free. Without /proc (macOS) it is all memory of the machine.

    Args:
        root: where /proc and /sys are.
    """
    free, swap = _free_bytes(root), 0
    if free is None:
        return AvailableMemory(physical_bytes(), "of the machine")
    available, swap = free
    rooms = [AvailableMemory(available + swap, "free on this machine" + (", swap included" if swap else ""))]
    rooms += [
        AvailableMemory(left + swap, "left by the memory limit of the control group")
        for left in _cgroup_headrooms(root)
    ]
    return min(rooms, key=lambda room: room.size)


def available_process_memory(root: Path = ROOT) -> AvailableMemory | None:
    """Return what one process can still map under its limit of address space (`ulimit -v`); None without a limit."""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit == resource.RLIM_INFINITY:
        return None
    return AvailableMemory(max(0, limit - _mapped_bytes(root)), "left by the limit of address space (ulimit -v)")


def _free_bytes(root: Path) -> tuple[int, int] | None:
    """MemAvailable and SwapFree; None where the kernel does not tell."""
    try:
        lines = (root / "proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    kib = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines) if rest.strip()}
    return (kib["MemAvailable"] * 1024, kib.get("SwapFree", 0) * 1024) if "MemAvailable" in kib else None


def _mapped_bytes(root: Path) -> int:
    try:
        pages = int((root / "proc/self/statm").read_text(encoding="ascii").split()[0])
    except OSError:
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def _cgroup_headrooms(root: Path) -> Iterator[int]:
    """What each control group over this process leaves, of version 1 and 2."""
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
            # Inside a container the path may be that of the host; the mount itself is then the group.
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
