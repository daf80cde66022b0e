"""Faults of a run, as `log_fault` wrote them."""

from contextlib import suppress
from pathlib import Path
from typing import Any

from moefold.bounded_read import bounded_lines, open_regular, parse_json
from moefold.metrics.writer import FAULTS_FILE


def read_faults(run_dir: Path) -> list[dict[str, Any]]:
    """Return the faults of a run in order."""
    path = run_dir / FAULTS_FILE
    if not path.is_file():
        return []
    faults = []
    with open_regular(path) as file:
        for line in bounded_lines(file):
            # A killed run may leave a torn line.
            with suppress(ValueError):
                faults.append(parse_json(line))
    return faults
