"""Kernels compile for Hopper, and their products run on its matrix units; no GPU is needed for that."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "compile_for_hopper.py"


@pytest.mark.slow
def test_products_become_instructions_of_the_matrix_units():
    # Where kernels are interpreted, they cannot be compiled.
    words = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True, timeout=280, env=words)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 10
    for line in lines:
        assert "wgmma.mma_async" in line, line
        assert ("e4m3.e4m3" in line) == ("e4m3" in line.split()[1]), line
        assert "cp.async" in line or "weights e4m3" in line, line
