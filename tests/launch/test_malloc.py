"""Freed memory: a conversion gives it back, training has it for its next step."""

import os
import platform
import subprocess
import sys

import pytest

from moefold.launch import threads_and_malloc
from moefold.launch.threads_and_malloc import keeps_freed_blocks

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc")

BLOCKS = """
import ctypes, sys
from pathlib import Path
from moefold.launch.threads_and_malloc import keep_freed_blocks, return_large_blocks
resident = lambda: int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 1e6
libc = ctypes.CDLL(None)
libc.malloc.restype = libc.memset.restype = ctypes.c_void_p
def block(size):
    found = libc.malloc(ctypes.c_size_t(size))
    libc.memset(ctypes.c_void_p(found), 1, ctypes.c_size_t(size))
    return found
def free(blocks):
    for one in blocks:
        libc.free(ctypes.c_void_p(one))
"""
"""Blocks as torch has them for tensors, without torch, whose import takes longer than all else here."""
GAPS = """
if sys.argv[1] == "yes":
    return_large_blocks()
# The first one that is freed raises the size from which on glibc maps blocks by themselves.
free([block(31_600_000)])
large, small, before = [None] * 4, [None] * 4, resident()
for i in range(4):
    large[i] = block(20_000_000)
    small[i] = block(80_000)
free(large)
print(resident() - before)
"""
STEPS = """
if sys.argv[1] == "yes":
    keep_freed_blocks("cpu")
before = resident()
for _ in range(2):
    # Blocks of 40 MB, which glibc maps by themselves, however often they were freed: its limit is 32 MB.
    free([block(40_000_000) for _ in range(3)])
print(resident() - before)
"""


def _found(program: str, told: str, **variables: str) -> float:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    words = [sys.executable, "-c", BLOCKS + program, told]
    done = subprocess.run(
        words, capture_output=True, text=True, check=True, timeout=60, env={**environment, **variables}
    )
    return float(done.stdout)


def test_freed_blocks_are_not_resident():
    """The gaps between small blocks are, where nothing is said."""
    assert _found(GAPS, "yes") < 10 < 60 < _found(GAPS, "no")


SMALL = """
keep_freed_blocks("cpu")
if sys.argv[1] == "yes":
    return_large_blocks()
blocks, before = [None] * 250, resident()
for i in range(250):
    # Nothing else is allocated: a Python object above them would keep the end of the heap in use.
    blocks[i] = block(400_000)
free(blocks)
print(resident() - before)
"""


def test_a_conversion_of_several_ranks_trims_its_heap():
    """It has joined them, and was told before to keep the memory that it frees."""
    assert _found(SMALL, "yes") < 20 < 80 < _found(SMALL, "no")


def test_an_older_glibc_takes_a_smaller_size_or_none(monkeypatch):
    """2.31 refuses more than 32 MiB; to trim never and map as by default would be slower than to say nothing."""
    for largest, expected in ((1 << 30, [(-3, 1 << 30), (-1, -1)]), (1 << 25, [(-3, 1 << 25), (-1, -1)]), (0, [])):
        taken = []

        def mallopt(name, value, largest=largest, taken=taken):
            if value > largest or not largest:
                return 0
            taken.append((name, value))
            return 1

        monkeypatch.setattr(threads_and_malloc, "_mallopt", lambda mallopt=mallopt: mallopt)
        threads_and_malloc.keep_freed_blocks("cpu", {})
        assert taken == expected


def test_a_step_has_the_memory_of_the_one_before():
    """The 120 MB of a step stay resident; by default they go back to the system, which would clear them again."""
    # Page faults are not counted: their number depends on the kernel and its huge pages, and may be 0.
    assert _found(STEPS, "no") < 40 < 100 < _found(STEPS, "yes")


def test_glibc_settings_of_the_user_are_preserved():
    # Mapped by itself is each block of a page or more.
    assert _found(STEPS, "yes", MALLOC_MMAP_THRESHOLD_="4096") < 40


def test_malloc_keeps_freed_blocks_on_a_cpu_unless_the_user_set_it():
    assert keeps_freed_blocks("cpu", {"GLIBC_TUNABLES": "glibc.rtld.nns=2"})
    assert not keeps_freed_blocks("cuda", {})
    assert not keeps_freed_blocks("cpu", {"MALLOC_TRIM_THRESHOLD_": "131072"})
    assert not keeps_freed_blocks("cpu", {"LD_PRELOAD": "/usr/lib/libjemalloc.so.2"})
    assert not keeps_freed_blocks("cpu", {"GLIBC_TUNABLES": "glibc.malloc.trim_threshold=131072"})
