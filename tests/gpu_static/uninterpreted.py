"""Programs of this folder run in a process whose Triton kernels are compiled, not interpreted."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def run_uninterpreted(*words: str, timeout_s: float = 240) -> Any:
    """Run Python with these arguments in the checkout's folder, and return the JSON that it prints."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, env=environment, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
