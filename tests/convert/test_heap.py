"""What is freed goes back to the system, whatever was allocated behind it."""

import platform
import subprocess
import sys

import pytest

PROGRAM = """
import sys, torch
from pathlib import Path
from moefold.convert.heap import return_large_blocks
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


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc is told")
def test_freed_blocks_are_not_resident():
    """The gaps between small blocks are, where nothing is said."""
    found = {}
    for told in ("yes", "no"):
        words = [sys.executable, "-c", PROGRAM, told]
        found[told] = float(subprocess.run(words, capture_output=True, text=True, check=True, timeout=60).stdout)
    assert found["yes"] < 10 < 100 < found["no"]
