"""What becomes of freed memory: a conversion gives it back, training has it for its next step."""

import os
import platform
import subprocess
import sys

import pytest

from moefold.launch import runtime_env
from moefold.launch.runtime_env import keeps_freed_blocks

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc")

GAPS = """
import sys, torch
from pathlib import Path
from moefold.launch.runtime_env import return_large_blocks
if sys.argv[1] == "yes":
    return_large_blocks()
resident = lambda: int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 1e6
# The first one that is freed raises the size from which on glibc maps blocks by themselves.
torch.ones(7_900_000)
before, small, large = resident(), [], []
for _ in range(8):
    large.append(torch.ones(5_000_000))
    small.append(torch.ones(20_000))
del large
print(resident() - before)
"""
STEPS = """
import sys, torch
from pathlib import Path
from moefold.launch.runtime_env import keep_freed_blocks
if sys.argv[1] == "yes":
    keep_freed_blocks("cpu")
resident = lambda: int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 1e6
def step():
    # Blocks of 40 MB, which glibc maps by themselves, however often they were freed: its limit is 32 MB.
    return [torch.ones(10_000_000) for _ in range(4)]
torch.ones(10)
before = resident()
for _ in range(4):
    step()
print(resident() - before)
"""


def _found(program: str, told: str, **variables: str) -> float:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    words = [sys.executable, "-c", program, told]
    done = subprocess.run(
        words, capture_output=True, text=True, check=True, timeout=60, env={**environment, **variables}
    )
    return float(done.stdout)


def test_freed_blocks_are_not_resident():
    """The gaps between small blocks are, where nothing is said."""
    assert _found(GAPS, "yes") < 10 < 100 < _found(GAPS, "no")


SMALL = """
import ctypes, sys
from pathlib import Path
from moefold.launch.runtime_env import keep_freed_blocks, return_large_blocks
keep_freed_blocks("cpu")
if sys.argv[1] == "yes":
    return_large_blocks()
resident = lambda: int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 1e6
libc = ctypes.CDLL(None)
libc.malloc.restype = libc.memset.restype = ctypes.c_void_p
blocks, before = [None] * 500, resident()
for i in range(500):
    # Allocate nothing else: a Python object above them would keep the end of the heap in use.
    blocks[i] = libc.malloc(400_000)
    libc.memset(ctypes.c_void_p(blocks[i]), 1, 400_000)
for block in blocks:
    libc.free(ctypes.c_void_p(block))
print(resident() - before)
"""


def test_a_conversion_of_several_ranks_trims_its_heap():
    """It has joined them, and been told to keep what it frees, before."""
    assert _found(SMALL, "yes") < 20 < 150 < _found(SMALL, "no")


def test_an_older_glibc_takes_a_smaller_size_or_is_left_alone(monkeypatch):
    """2.31 refuses more than 32 MiB; to trim never and map as by default would be slower than to say nothing."""
    for largest, expected in ((1 << 30, [(-3, 1 << 30), (-1, -1)]), (1 << 25, [(-3, 1 << 25), (-1, -1)]), (0, [])):
        taken = []

        def mallopt(name, value, largest=largest, taken=taken):
            if value > largest or not largest:
                return 0
            taken.append((name, value))
            return 1

        monkeypatch.setattr(runtime_env, "_mallopt", lambda mallopt=mallopt: mallopt)
        runtime_env.keep_freed_blocks("cpu", {})
        assert taken == expected


def test_a_step_has_the_memory_of_the_one_before():
    """The 160 MB of a step stay resident; by default they go back to the system, which would clear them again."""
    # Page faults are not counted: their number depends on the kernel and its huge pages, and may be 0.
    assert _found(STEPS, "no") < 60 < 120 < _found(STEPS, "yes")


def test_glibc_settings_of_the_user_are_preserved():
    # Mapped by itself is each block of a page or more.
    assert _found(STEPS, "yes", MALLOC_MMAP_THRESHOLD_="4096") < 60


def test_who_keeps_freed_blocks():
    assert keeps_freed_blocks("cpu", {"GLIBC_TUNABLES": "glibc.rtld.nns=2"})
    assert not keeps_freed_blocks("cuda", {})
    assert not keeps_freed_blocks("cpu", {"MALLOC_TRIM_THRESHOLD_": "131072"})
    assert not keeps_freed_blocks("cpu", {"LD_PRELOAD": "/usr/lib/libjemalloc.so.2"})
    assert not keeps_freed_blocks("cpu", {"GLIBC_TUNABLES": "glibc.malloc.trim_threshold=131072"})
