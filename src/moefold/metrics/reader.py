"""Read metrics.jsonl: the lines of training steps and of the evaluation before the first step."""

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeGuard

from moefold.bounded_read import LongLineError, bounded_lines, open_regular, parse_json
from moefold.errors import ConfigError

METRICS_FILE = "metrics.jsonl"
"""Name of the metrics file in the run folder: one JSON object per line, one line per step."""
NONFINITE = "nonfinite"
"""Key of the names of a line's numbers that are not finite."""
MAX_STEP = 2**53
"""Largest step number that float64 represents exactly."""
MAX_VALUE = 1e300
"""Largest magnitude of a measurement. Sums of larger values overflow."""


def is_step(value: Any) -> TypeGuard[int]:
    """Return whether a value is the number of a step. 0 means the weights before the first step."""
    return type(value) is int and 0 <= value <= MAX_STEP


def parse_step(text: str | bytes) -> dict[str, Any] | None:
    """Return the record of a line of a metrics file, or None for an invalid line."""
    try:
        record = parse_json(text)
    except ValueError:
        return None
    return record if isinstance(record, dict) and is_step(record.get("step")) else None


def read_lines(path: Path) -> Iterator[tuple[str, dict[str, Any] | None]]:
    """Yield each line of a metrics file, without its newline, with its record, or None for an invalid (truncated) line.

    A missing file yields nothing.

    Raises:
        ConfigError: the file cannot be read, is not a regular file, or has an overlong line.
    """
    if not path.exists():
        return
    try:
        with open_regular(path) as file:
            for line in bounded_lines(file):
                text = line.decode("utf-8", errors="replace").rstrip("\n")
                yield text, parse_step(text)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}; remove it, or name another run") from None
    except LongLineError as error:
        raise ConfigError(f"{path} is not a metrics file: {error}; remove it, or name another run") from None


def read_records(run_dir: Path) -> list[dict[str, Any]]:
    """Return the valid lines of a run, including the evaluation before the first step. Raise as `read_lines`."""
    return [record for _, record in read_lines(run_dir / METRICS_FILE) if record is not None]


def read_steps(run_dir: Path) -> list[dict[str, Any]]:
    """Return the lines of a run's training steps. Raise ConfigError if the file cannot be read."""
    return [record for record in read_records(run_dir) if record["step"] > 0]


def has_evaluation(run_dir: Path, step: int) -> bool:
    """Return whether the line of a step has an evaluation, finite or not. Raise as `read_lines`."""
    records = [record for record in read_records(run_dir) if record["step"] == step]
    if not records:
        return False
    record = records[-1]
    rewards = record.get("rl")
    reward = rewards.get("eval_reward") if isinstance(rewards, dict) else None
    return reward is not None or record.get("eval_loss") is not None or "eval_loss" in nonfinite_of(record)


def finite_number(value: Any) -> float:
    """Return a measurement as float, or NaN for a value of another type or a too large number."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= MAX_VALUE:
        return math.nan
    return float(value)


def value_of(record: Mapping[str, Any], path: str) -> float:
    """Return a number of a line by its path, "rl.reward", or NaN if it is missing, or was not finite."""
    section, _, name = path.rpartition(".")
    values = record.get(section) if section else record
    return finite_number(values.get(name)) if isinstance(values, Mapping) else math.nan


def nonfinite_of(record: Mapping[str, Any]) -> dict[str, str]:
    """Return the NaN and infinite values of a line, by path."""
    values = record.get(NONFINITE)
    return values if isinstance(values, dict) else {}
