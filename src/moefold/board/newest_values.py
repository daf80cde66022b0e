"""Newest step and values of a metrics file, from its last lines. Torch-free."""

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from moefold.bounded_read import KIB, MIB, open_regular
from moefold.metrics.reader import nonfinite_of, parse_step, value_of

LAST_BYTES = 256 * KIB
"""Bytes at the end of the file in which the last line is looked for."""
MAX_SEARCH_BYTES = 4 * MIB
"""Bytes before the end in which the newest evaluation is looked for, once a file."""
NAMES = ("loss", "eval_loss", "rl.reward", "tokens_per_s")
SPARSE = "eval_loss"
"""Metric that only some steps have: its newest value stays until a later one, or until the run goes back."""
_EVALUATION = re.compile(rb'"eval_loss": ?(?:[-\d]|null.*"nonfinite".*"eval_loss")')


@dataclass(frozen=True, slots=True)
class NewestValue:
    """Value of a metric and its step."""

    step: int
    value: float
    """NaN if it was not finite."""


class NewestValues:
    """Reads the end of a metrics file again whenever the file has changed, however long it is.

    Every row of the table of runs comes from here, whether or not the rest of the file was ever read.

    Args:
        path: the file; it may not exist yet.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._clear()

    def _clear(self) -> None:
        self.step = 0
        """Last step; 0 without one."""
        self.is_cut = False
        """The file ends within a line."""
        self._stamp: tuple[int, int, int] | None = None
        self._values: dict[str, NewestValue] = {}
        self._was_searched = False

    def value(self, name: str) -> NewestValue | None:
        """Return the newest value of one of `NAMES`; None if there is none."""
        return self._values.get(name)

    def read(self) -> None:
        """Read the last lines if the file has changed since the last call."""
        try:
            with open_regular(self._path) as file:
                status = os.fstat(file.fileno())
                stamp = (status.st_ino, status.st_size, status.st_mtime_ns)
                if stamp == self._stamp:
                    return
                if self._stamp is None or stamp[0] != self._stamp[0] or stamp[1] < self._stamp[1]:
                    self._clear()
                self._stamp = stamp
                self._read(file, status.st_size)
        except OSError:
            self._clear()

    def _read(self, file: BinaryIO, size: int) -> None:
        block = _last_lines(file, size, LAST_BYTES)
        self.is_cut = bool(block) and not block.endswith(b"\n")
        lines = block[: block.rfind(b"\n") + 1].split(b"\n")
        record = next(filter(None, map(parse_step, reversed(lines))), None)
        if record is None:
            return
        sparse = self._values.get(SPARSE)
        self.step = record["step"]
        self._values = _values_of(record)
        if SPARSE in self._values:
            return
        newer = _newest_evaluation(lines)
        if newer is None and sparse is None and not self._was_searched:
            newer = _newest_evaluation(_last_lines(file, size, MAX_SEARCH_BYTES).split(b"\n"))
            self._was_searched = True
        found = newer or sparse
        if found is not None and found.step <= self.step:
            self._values[SPARSE] = found


def _last_lines(file: BinaryIO, size: int, max_bytes: int) -> bytes:
    """Return the end of a file from the first line start among its last bytes."""
    start = max(0, size - max_bytes)
    file.seek(start)
    block = file.read(size - start)
    return block[block.find(b"\n") + 1 :] if start else block


def _values_of(record: dict[str, Any]) -> dict[str, NewestValue]:
    """Return the values of a line; one that was not finite, or that `nonfinite` names, is NaN."""
    broken = nonfinite_of(record)
    found = {}
    for name in NAMES:
        value = value_of(record, name)
        if name in broken or not np.isnan(value):
            found[name] = NewestValue(record["step"], value)
    return found


def _newest_evaluation(lines: list[bytes]) -> NewestValue | None:
    for line in reversed(lines):
        record = parse_step(line) if _EVALUATION.search(line) else None
        if record is not None and SPARSE in (found := _values_of(record)):
            return found[SPARSE]
    return None
