"""The board as a process of its own."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def served(folder: Path) -> Iterator[str]:
    command = [sys.executable, "-m", "moefold", "board", str(folder), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as board:
        assert board.stdout is not None
        try:
            yield board.stdout.readline().split()[-1]
        finally:
            board.terminate()
