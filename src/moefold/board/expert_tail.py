"""Incremental reader of expert_counts.bin: shares of every expert over ranges of steps. Torch-free."""

import os
from pathlib import Path
from typing import BinaryIO

import numpy as np

from moefold.board.step_ranges import StepRanges
from moefold.bounded_read import MIB, open_regular
from moefold.metrics.expert_balance import COUNTS_FILE, Array, CountsHeader, read_counts_header

MAX_CELLS = 1 << 20
"""Limit of ranges * layers * experts: what a picture shows, and what one answer sends as bytes."""
MAX_RANGES = 128
MAX_READ_BYTES = 64 * MIB
"""Bytes that one call reads. If the file has gained more, records are read at equal distances."""
_FINGERPRINT_BYTES = 64


class ExpertCountsTail:
    """Reads the records that expert_counts.bin gained since the last call; a file started over is read again."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / COUNTS_FILE
        self.generation = 0
        self._clear()

    def _clear(self) -> None:
        self.header: CountsHeader | None = None
        self.problem = ""
        self.is_sampled = False
        """Records were left out, as the file had gained more than `MAX_READ_BYTES` at once."""
        self._identity: tuple[int, int] | None = None
        self._num_read = 0
        self._fingerprint = b""
        self._ranges: StepRanges | None = None

    @property
    def ranges(self) -> StepRanges | None:
        """Mean counts over ranges of steps, [ranges, L, E]; None as long as there is no record."""
        return self._ranges if self._ranges is not None and len(self._ranges) else None

    def read(self) -> None:
        """Read the new records."""
        try:
            with open_regular(self._path) as file:
                self._read(file)
        except FileNotFoundError:
            self._restart()
        except OSError as error:
            self._restart()
            self.problem = f"{COUNTS_FILE} cannot be read: {error.strerror or error}"

    def _restart(self) -> None:
        if self._num_read:
            self.generation += 1
        self._clear()

    def _read(self, file: BinaryIO) -> None:
        status = os.fstat(file.fileno())
        header = read_counts_header(file)
        start = file.tell()
        if header is None:
            self._restart()
            # A run that just began has not written the whole first line.
            if status.st_size:
                self.problem = f"{COUNTS_FILE} is not a file of expert counts"
            return
        record = header.record_dtype
        num_records = (status.st_size - start) // record.itemsize
        identity = (status.st_dev, status.st_ino)
        if not self._continues(file, header, start, identity, num_records):
            self._restart()
        if self._ranges is None:
            self._ranges = make_ranges(len(header.layers), header.num_experts)
        self.header = header
        self._identity = identity
        stride = max(1, -(-(num_records - self._num_read) * record.itemsize // MAX_READ_BYTES))
        self.is_sampled |= stride > 1
        for i in range(self._num_read, num_records, stride):
            file.seek(start + i * record.itemsize)
            content = file.read(record.itemsize)
            if len(content) < record.itemsize:
                # Truncated since the size was read: the next call starts over.
                return
            row = np.frombuffer(content, record)
            self._ranges.append(int(row["step"][0]), row["counts"][0].astype(np.float64))
            self._num_read = i + 1
            self._fingerprint = row.tobytes()[:_FINGERPRINT_BYTES]
            self._last_record = i

    def _continues(
        self, file: BinaryIO, header: CountsHeader, start: int, identity: tuple[int, int], num_records: int
    ) -> bool:
        """Return whether the file still has the record that was read last, at the same place."""
        if not self._num_read:
            return True
        if header != self.header or identity != self._identity or num_records < self._num_read:
            return False
        file.seek(start + self._last_record * header.record_dtype.itemsize)
        return file.read(len(self._fingerprint)) == self._fingerprint

    _last_record = 0


def make_ranges(num_layers: int, num_experts: int) -> StepRanges:
    """Return ranges for counts [L, E], as many as `MAX_CELLS` allows."""
    num_ranges = max(2, min(MAX_RANGES, MAX_CELLS // (num_layers * num_experts)) // 2 * 2)
    return StepRanges((num_layers, num_experts), num_ranges)


def shares_of(means: Array) -> Array:
    """Return each expert's tokens over the mean of its layer, float64 [ranges, L, E], from mean counts."""
    mean = means.mean(2, keepdims=True)
    shares: Array = np.divide(means, mean, out=np.zeros_like(means), where=mean > 0)
    return shares
