"""Faults of a run, as `log_fault` wrote them."""

from pathlib import Path
from typing import Any

from moefold.bounded_read import bounded_lines, open_regular, parse_json
from moefold.metrics.writer import FAULTS_FILE


def read_faults(run_dir: Path) -> list[dict[str, Any]]:
    """Return the faults of a run in order."""
    path = run_dir / FAULTS_FILE
    if not path.is_file():
        return []
    with open_regular(path) as file:
        return [parse_json(line) for line in bounded_lines(file)]
