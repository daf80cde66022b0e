"""Readers of all JSON lines, or the newest values, of a file that another process extends, truncates or replaces."""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from moefold.bounded_read import MAX_LINE_BYTES, open_regular, parse_json
from moefold.metrics.reader import nonfinite_of, parse_step, value_of
from moefold.units import KIB, MIB

MAX_READ_BYTES = 16 * MIB
"""Maximum bytes per call, unless a single line is longer: about half a second of parsing."""
MAX_PROBLEMS = 5
"""Maximum number of reported invalid lines. The others are only counted."""
_FINGERPRINT_BYTES = 256


@dataclass(frozen=True, slots=True)
class JsonLine:
    """Complete line with a JSON object."""

    offset: int
    """Position of the line's first byte in the file."""
    length: int
    """Bytes, including the line end."""
    record: dict[str, Any]


class JsonTail:
    """Reader of the new complete lines of a file since the last call.

    An unfinished last line stays in the file until its line end is written. If a file was truncated or replaced, such
    as by a resumed run, it is read again from its start.

    Args:
        path: the file. It may not exist yet.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.generation = 0
        """Number of restarts of the file. After a change all earlier lines are void."""
        self._clear()

    def _clear(self) -> None:
        self.offset = 0
        self.size = 0
        """Bytes of the file at the last call."""
        self._identity: tuple[int, int] | None = None
        self._fingerprint = b""
        self._num_lines = 0
        self._problems: list[str] = []
        self._num_invalid = 0
        self._is_blocked = False

    @property
    def problems(self) -> list[str]:
        """Messages about the file: lines that are not JSON objects, or the reason why it cannot be read."""
        unnamed = self._num_invalid - MAX_PROBLEMS
        summary = [f"{self.path.name}: {unnamed} more lines are not JSON objects"] if unnamed > 0 else []
        return self._problems + summary

    @property
    def read_fraction(self) -> float:
        """Read bytes over the bytes of the file, or 1 for an empty file."""
        return self.offset / self.size if self.size else 1.0

    @property
    def has_more(self) -> bool:
        """Return whether the last call stopped at its limit of bytes."""
        return self._is_cut and not self._is_blocked

    _is_cut = False

    def read(self, max_bytes: int = MAX_READ_BYTES) -> list[JsonLine]:
        """Return the new lines, at most about `max_bytes` bytes."""
        self._is_cut = False
        try:
            with open_regular(self.path) as file:
                return self._read(file, max_bytes)
        except FileNotFoundError:
            self._restart()
        except OSError as error:
            self._restart()
            self._problems = [f"{self.path.name} cannot be read: {error.strerror or error}"]
        return []

    def read_line(self, offset: int, length: int) -> dict[str, Any] | None:
        """Return the record at a position from `read`, or None if the file has changed since."""
        try:
            with open_regular(self.path) as file:
                file.seek(offset)
                record = parse_json(file.read(length))
        except (OSError, ValueError):
            return None
        return record if isinstance(record, dict) else None

    def _restart(self) -> None:
        if self.offset:
            self.generation += 1
        self._clear()

    def _read(self, file: BinaryIO, max_bytes: int) -> list[JsonLine]:
        status = os.fstat(file.fileno())
        identity = (status.st_dev, status.st_ino)
        if not self._continues(file, identity, status.st_size):
            self._restart()
        self._identity = identity
        self.size = status.st_size
        if self._is_blocked:
            return []
        file.seek(self.offset)
        block = file.read(max_bytes)
        if b"\n" not in block and len(block) == max_bytes:
            block += file.readline(MAX_LINE_BYTES)
            if not block.endswith(b"\n") and len(block) > MAX_LINE_BYTES:
                self._is_blocked = True
                self._problems.append(
                    f"{self.path.name}: line {self._num_lines + 1} is longer than {MAX_LINE_BYTES:,} bytes; "
                    "the file is read up to it"
                )
                return []
        self._is_cut = self.offset + len(block) < self.size
        complete = block[: block.rfind(b"\n") + 1]
        lines = list(self._parse(complete))
        self.offset += len(complete)
        if complete:
            self._fingerprint = complete[-_FINGERPRINT_BYTES:]
        return lines

    def _continues(self, file: BinaryIO, identity: tuple[int, int], size: int) -> bool:
        """Return whether the file still has the last bytes that were read, at the same position."""
        if not self.offset:
            return True
        if identity != self._identity or size < self.offset:
            return False
        file.seek(self.offset - len(self._fingerprint))
        return file.read(len(self._fingerprint)) == self._fingerprint

    def _parse(self, complete: bytes) -> Iterator[JsonLine]:
        offset = self.offset
        # Not `splitlines`, which also splits at carriage returns.
        for line in complete.split(b"\n")[:-1]:
            self._num_lines += 1
            try:
                record = parse_json(line)
            except ValueError:
                record = None
            if isinstance(record, dict):
                yield JsonLine(offset, len(line) + 1, record)
            else:
                self._num_invalid += 1
                if self._num_invalid <= MAX_PROBLEMS:
                    self._problems.append(f"{self.path.name}: line {self._num_lines} is not a JSON object; left out")
            offset += len(line) + 1


LAST_BYTES = 256 * KIB
"""Bytes at the end of the file that are searched for the last line."""
MAX_SEARCH_BYTES = 4 * MIB
"""Bytes before the end that are searched for the newest evaluation, once per file."""
NAMES = ("loss", "eval_loss", "rl.reward", "tokens_per_s")
SPARSE = "eval_loss"
"""Metric that only some steps have: its newest value is kept until a later value, or until the run goes back."""
_EVALUATION = re.compile(rb'"eval_loss": ?(?:[-\d]|null.*"nonfinite".*"eval_loss")')


@dataclass(frozen=True, slots=True)
class NewestValue:
    """Value of a metric and its step."""

    step: int
    value: float
    """The recorded value, or NaN if that was not finite."""


class NewestValues:
    """Reader of the end of a metrics file, again after each change of the file, whatever its length.

    Every row of the table of runs comes from this class, even if the rest of the file was never read.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._clear()

    def _clear(self) -> None:
        self.step = 0
        """Last step, or 0 without steps."""
        self.is_cut = False
        """True if the file ends within a line."""
        self._stamp: tuple[int, int, int] | None = None
        self._values: dict[str, NewestValue] = {}
        self._was_searched = False

    def value(self, name: str) -> NewestValue | None:
        """Return the newest value of a metric of `NAMES`, or None if there is none."""
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
        newest = newer or sparse
        if newest is not None and newest.step <= self.step:
            self._values[SPARSE] = newest


def _last_lines(file: BinaryIO, size: int, max_bytes: int) -> bytes:
    """Return the end of a file from the first start of a line among its last bytes."""
    start = max(0, size - max_bytes)
    file.seek(start)
    block = file.read(size - start)
    return block[block.find(b"\n") + 1 :] if start else block


def _values_of(record: dict[str, Any]) -> dict[str, NewestValue]:
    """Return the values of a line. A value that is not finite, or that `nonfinite` names, is NaN."""
    broken = nonfinite_of(record)
    values = {}
    for name in NAMES:
        value = value_of(record, name)
        if name in broken or not np.isnan(value):
            values[name] = NewestValue(record["step"], value)
    return values


def _newest_evaluation(lines: list[bytes]) -> NewestValue | None:
    for line in reversed(lines):
        record = parse_step(line) if _EVALUATION.search(line) else None
        if record is not None and SPARSE in (values := _values_of(record)):
            return values[SPARSE]
    return None
