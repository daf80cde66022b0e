"""The command line in an interpreter that must not import torch or matplotlib."""

import subprocess
import sys
from pathlib import Path


def run_calls_without_torch(calls: list[list[str]], **where: Path) -> subprocess.CompletedProcess[str]:
    """Print the status of each call of the command line in a new interpreter, and fail if one imported either."""
    program = f"import sys; from moefold.cli.main import main; print([main(words) for words in {calls!r}]);"
    program += "assert not {'torch', 'matplotlib'} & set(sys.modules)"
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, **where)
