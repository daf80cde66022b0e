"""Incremental reader of JSON lines that another process appends to, truncates or replaces. Torch-free."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from moefold.bounded_read import MAX_LINE_BYTES, MIB, open_regular, parse_json

MAX_READ_BYTES = 16 * MIB
"""Bytes that one call reads, unless a single line is longer: about half a second of parsing."""
MAX_PROBLEMS = 5
"""Invalid lines that are named; the others are counted."""
_FINGERPRINT_BYTES = 256


@dataclass(frozen=True, slots=True)
class JsonLine:
    """One complete line with a JSON object."""

    offset: int
    """Position of its first byte in the file."""
    length: int
    """Bytes, line end included."""
    record: dict[str, Any]


class JsonTail:
    """Reads the complete lines that a file gained since the last call.

    An unfinished last line stays in the file until its line end is written. A file that was truncated or replaced, as a
    resumed run does, is read from its start again.

    Args:
        path: the file; it may not exist yet.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.generation = 0
        """How often the file was started over; a change means that all earlier lines are void."""
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
        """Messages about the file: lines that are no JSON objects, or a reason why it cannot be read."""
        unnamed = self._num_invalid - MAX_PROBLEMS
        more = [f"{self.path.name}: {unnamed} more lines are no JSON objects"] if unnamed > 0 else []
        return self._problems + more

    @property
    def read_fraction(self) -> float:
        """Read bytes over the bytes of the file; 1 for an empty file."""
        return self.offset / self.size if self.size else 1.0

    @property
    def has_more(self) -> bool:
        """Return whether the last call stopped at its limit of bytes."""
        return self._is_cut and not self._is_blocked

    _is_cut = False

    def read(self, max_bytes: int = MAX_READ_BYTES) -> list[JsonLine]:
        """Return the new lines, at most about `max_bytes` of them."""
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
        """Return the record at a position that `read` returned; None if the file has changed since."""
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
        """Return whether the file still has the bytes that were read last, at the same place."""
        if not self.offset:
            return True
        if identity != self._identity or size < self.offset:
            return False
        file.seek(self.offset - len(self._fingerprint))
        return file.read(len(self._fingerprint)) == self._fingerprint

    def _parse(self, complete: bytes) -> Iterator[JsonLine]:
        offset = self.offset
        for line in complete.splitlines(keepends=True) if b"\r" not in complete else _split(complete):
            self._num_lines += 1
            try:
                record = parse_json(line)
            except ValueError:
                record = None
            if isinstance(record, dict):
                yield JsonLine(offset, len(line), record)
            else:
                self._num_invalid += 1
                if self._num_invalid <= MAX_PROBLEMS:
                    self._problems.append(f"{self.path.name}: line {self._num_lines} is no JSON object; it is left out")
            offset += len(line)


def _split(complete: bytes) -> list[bytes]:
    """Split at line feeds only: `bytes.splitlines` also splits at carriage returns."""
    return [line + b"\n" for line in complete.split(b"\n")[:-1]]
