"""RUN_DIR/faults.jsonl: what went wrong in a run and what was done about it, one JSON object a fault. Torch-free.

The file only grows: a fault that a rollback or a resume went back behind has happened all the same.
"""

import contextlib
import json
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moefold.bounded_read import bounded_lines, open_regular, parse_json

FAULTS_FILE = "faults.jsonl"
"""Name of the log inside the run folder; absent while nothing has gone wrong."""


def log_fault(run_dir: Path, record: Mapping[str, Any]) -> None:
    """Append one fault, with the time in seconds since 1970; NaN and infinities are written as words."""
    line = json.dumps(
        {"time_s": round(time.time(), 3), **{key: _to_json_value(value) for key, value in record.items()}}
    )
    with (run_dir / FAULTS_FILE).open("a", encoding="utf-8") as file:
        file.write(line + "\n")


def read_faults(run_dir: Path) -> list[dict[str, Any]]:
    """The faults of a run in the order they came, a line that a kill has torn left out."""
    path = run_dir / FAULTS_FILE
    if not path.is_file():
        return []
    found = []
    with open_regular(path) as file:
        for line in bounded_lines(file):
            with contextlib.suppress(ValueError):
                found.append(parse_json(line))
    return found


def _to_json_value(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {key: _to_json_value(part) for key, part in value.items()}
    return [_to_json_value(part) for part in value] if isinstance(value, list | tuple) else value
