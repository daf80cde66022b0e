"""Running a tutorial: its blocks become one shell script, and its output is compared with the page."""

import os
import re
import subprocess
from pathlib import Path

from tests.docs.markdown_page import Block, blocks

PICTURE = re.compile(r"[▁-█]")
NUMBER = re.compile(r"(?<= )\d[\d,.]*(?=[ kM]|$)")
WITH_VARYING_NUMBERS = re.compile(r"(#\d+|=|data) ")
"""Rows of a plan have predicted times and rates; the length of the text of a Python installation is its own."""
MASKS = (
    (re.compile(r"\b(loss|eval|reward|grad norm) +-?\d[\d.]*"), r"\1 #"),
    (re.compile(r"\d[\d,.]*(?= s\b)"), "#"),
    (re.compile(r"(?<= on )\S+(?= is stopped)"), "HOST"),
    # The machine decides where a rank was stopped.
    (re.compile(r"^( +ranks? .*?step )\d.*"), r"\1#"),
)
"""What a machine changes: losses, times, and the place of a hang."""


def script_of(page: Path) -> str:
    """Return the shell script of a tutorial: it writes the files and runs the commands, in order."""
    parts = ["set -euo pipefail"]
    for block in blocks(page):
        if block.not_run:
            continue
        if block.file:
            parts.append(_written(block.file, block.text))
        elif block.language == "python":
            parts.append(f"{_written('block.py', block.text)}\npython block.py")
        elif block.language == "sh" and block.status:
            parts.append(f"status=0\n(\n{block.text}) || status=$?\ntest $status = {block.status}")
        elif block.language == "sh":
            parts.append(block.text.rstrip("\n"))
    return "\n".join(parts) + "\n"


def _written(name: str, text: str) -> str:
    return f"cat > {name} <<'END_OF_FILE'\n{text}END_OF_FILE"


def run_tutorial(page: Path, folder: Path, commands: Path) -> str:
    """Run a tutorial in a folder and return its output. Fails with it if a command fails.

    Args:
        page: the tutorial.
        folder: an empty folder.
        commands: a folder with the programs `moefold` and `python`.
    """
    environment = {**os.environ, "PATH": f"{commands}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    done = subprocess.run(
        ["bash", "-c", script_of(page)],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:]
    return done.stdout


def lines_not_printed(page: Path, printed: str) -> list[str]:
    """Return the lines of the outputs on a page that the commands did not print. Measured numbers may differ."""
    found = {_masked(line) for line in printed.splitlines()}
    shown = [line for block in outputs(page) for line in block.text.splitlines()]
    return [line for line in shown if line.strip() and not _is_shown(_masked(line), found)]


def _is_shown(line: str, printed: set[str]) -> bool:
    # The end of a long line may be left out.
    return line in printed or any(other.startswith(line) for other in printed)


def _masked(line: str) -> str:
    line = PICTURE.sub("", line)
    if WITH_VARYING_NUMBERS.match(line):
        line = NUMBER.sub("#", line)
    for pattern, mask in MASKS:
        line = pattern.sub(mask, line)
    return " ".join(line.split())


def outputs(page: Path) -> list[Block]:
    """Return the blocks of a page that show an output."""
    return [block for block in blocks(page) if block.language == "text" and not block.file]
