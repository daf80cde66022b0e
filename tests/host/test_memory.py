"""Available memory respects swap, control groups and limits of the address space."""

from pathlib import Path

import pytest

from moefold.host import memory as host_memory
from moefold.host.memory import available_host_memory, available_process_memory

MIB = 2**20
MEMINFO = (
    "MemTotal:  4096000 kB\nMemFree:  1000 kB\nMemAvailable:   1024000 kB\nSwapTotal: 0 kB\nSwapFree:  {swap} kB\n"
)


def machine(folder: Path, swap: int = 0, groups: str = "", files: dict[str, str] | None = None) -> Path:
    """A root folder with the files that the kernel would show."""
    written = {"proc/meminfo": MEMINFO.format(swap=swap), "proc/self/cgroup": groups} | (files or {})
    for name, text in written.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def group(name: str, version: int, limit: str, usage: int, cache: int) -> dict[str, str]:
    names = {
        1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        2: ("memory.max", "memory.current", "inactive_file"),
    }[version]
    stat = f"anon 1\n{names[2]} {cache}\n"
    return dict(zip((f"{name}/{file}" for file in (*names[:2], "memory.stat")), (limit, str(usage), stat), strict=True))


def test_available_memory_includes_free_swap(tmp_path):
    assert available_host_memory(machine(tmp_path)).size == 1000 * MIB
    room = available_host_memory(machine(tmp_path, swap=2048))
    assert (room.size, room.description) == (1002 * MIB, "free on this machine, swap included")


@pytest.mark.parametrize(
    ("groups", "files", "room_mib"),
    [
        ("0::/job\n", group("sys/fs/cgroup/job", 2, str(500 * MIB), 300 * MIB, 100 * MIB), 300),
        ("0::/job\n", group("sys/fs/cgroup/job", 2, "max", 300 * MIB, 0), 1000),
        # The limit of a group above counts, and where the path is the host's also the limit of the mount.
        ("0::/job/step\n", group("sys/fs/cgroup/job", 2, str(500 * MIB), 100 * MIB, 0), 400),
        ("0::/docker/1a\n", group("sys/fs/cgroup", 2, str(200 * MIB), 50 * MIB, 0), 150),
        ("4:memory:/job\n0::/\n", group("sys/fs/cgroup/memory/job", 1, str(500 * MIB), 300 * MIB, 50 * MIB), 250),
        ("4:cpu,memory:/a\n", group("sys/fs/cgroup/memory", 1, str(90 * MIB), 30 * MIB, 0), 60),
        ("4:memory:/job\n", group("sys/fs/cgroup/memory/job", 1, str(2**63 - 4096), 3 * MIB, 0), 1000),
        ("4:memory:/job\n", group("sys/fs/cgroup/memory/job", 1, str(10 * MIB), 30 * MIB, 0), 0),
        ("4:cpu:/job\n", {}, 1000),
    ],
)
def test_control_groups_limit_it(tmp_path, groups, files, room_mib):
    assert available_host_memory(machine(tmp_path, groups=groups, files=files)).size == room_mib * MIB


def test_without_proc_it_is_the_whole_machine(tmp_path):
    room = available_host_memory(tmp_path)
    assert room.description == "of the machine"
    assert room.size > 0


def test_a_limit_of_address_space_is_of_each_process(tmp_path, monkeypatch):
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/statm").write_text("256 1 1")
    infinity = host_memory.resource.RLIM_INFINITY
    monkeypatch.setattr(host_memory.resource, "getrlimit", lambda _: (infinity, infinity))
    assert available_process_memory(tmp_path) is None
    monkeypatch.setattr(host_memory.resource, "getrlimit", lambda _: (MIB * 10, infinity))
    room = available_process_memory(tmp_path)
    assert room is not None
    assert room.size == 10 * MIB - 256 * host_memory.os.sysconf("SC_PAGE_SIZE")


def test_this_machine_has_memory():
    assert 0 < available_host_memory().size < 2**60
