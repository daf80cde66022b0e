"""Incremental readers of expert_counts.bin and routing traces with sums over ranges of steps."""

import os
from pathlib import Path
from typing import BinaryIO

import numpy as np

from moefold.bounded_read import open_regular
from moefold.config.sections.moe import TRACE_FOLDER
from moefold.data.routing_trace import MANIFEST, RoutingTrace, TracedStep, TraceShape, step_file
from moefold.errors import ConfigError, RunError
from moefold.metrics.expert_counts import COUNTS_FILE, Array, CountsHeader, read_counts_header
from moefold.units import MIB


class StepRanges:
    """Sums and counts of arrays of one shape over at most `max_ranges` ranges of consecutive records.

    When all ranges are full, neighbours are merged, and each range then has twice as many records.

    Args:
        max_ranges: even.
    """

    def __init__(self, shape: tuple[int, ...], max_ranges: int) -> None:
        assert max_ranges % 2 == 0, "pairs of ranges are merged"
        self.shape = shape
        self._sums = np.zeros((max_ranges, *shape))
        self._counts = np.zeros((max_ranges, *shape), dtype=np.int64)
        self._steps = np.zeros((max_ranges, 2), dtype=np.int64)
        self._num_records = 0
        self._num_ranges = 0
        self._length = 1

    def __len__(self) -> int:
        return self._num_ranges

    @property
    def last_step(self) -> int:
        """Step of the last record, or -1 without records."""
        return int(self._steps[self._num_ranges - 1, 1]) if self._num_ranges else -1

    @property
    def steps(self) -> Array:
        """First and last step of each range, int64 [ranges, 2]."""
        return self._steps[: self._num_ranges]

    def append(self, step: int, record: Array) -> None:
        """Add the record of a step, NaN for values that were not recorded.

        Ranges with this or a later step are dropped.
        """
        while self._num_ranges and self.last_step >= step:
            self._num_ranges -= 1
            self._num_records = self._length
        if not self._num_ranges or self._num_records == self._length:
            self._open_range(step)
        is_finite = np.isfinite(record)
        i = self._num_ranges - 1
        self._sums[i] += np.where(is_finite, record, 0.0)
        self._counts[i] += is_finite
        self._steps[i, 1] = step
        self._num_records += 1

    def means(self) -> Array:
        """Return the mean of each range, float64 [ranges, *shape], or NaN without a value."""
        count = self._counts[: self._num_ranges]
        means: Array = np.divide(
            self._sums[: self._num_ranges], count, out=np.full(count.shape, np.nan), where=count > 0
        )
        return means

    def _open_range(self, step: int) -> None:
        if self._num_ranges == len(self._sums):
            half = self._num_ranges // 2
            self._sums[:half] = self._sums[0::2] + self._sums[1::2]
            self._counts[:half] = self._counts[0::2] + self._counts[1::2]
            self._steps[:half] = np.stack([self._steps[0::2, 0], self._steps[1::2, 1]], axis=1)
            self._num_ranges = half
            self._length *= 2
        i = self._num_ranges
        self._sums[i] = 0.0
        self._counts[i] = 0
        self._steps[i] = step
        self._num_ranges += 1
        self._num_records = 0


MAX_CELLS = 1 << 20
"""Limit of ranges * layers * experts for a picture, and for the bytes of an answer."""
MAX_RANGES = 128
MAX_READ_BYTES = 64 * MIB
"""Maximum bytes per call. If the file has grown by more, records are read at equal distances."""
_FINGERPRINT_BYTES = 64


class CountsTail:
    """Counts of routed tokens over ranges of steps, from a file that a run extends or begins again."""

    def __init__(self) -> None:
        self.generation = 0
        """Number of restarts. After a change all earlier counts are void."""
        self._clear()

    def _clear(self) -> None:
        self.problem = ""
        self.layers: tuple[int, ...] = ()
        """Indices of the L MoE layers in the whole model."""
        self.is_sampled = False
        """True if only a part of the new data was read, because there was too much at once."""
        self._ranges: StepRanges | None = None

    @property
    def ranges(self) -> StepRanges | None:
        """Mean counts over ranges of steps, [ranges, L, E], or None without records."""
        return self._ranges if self._ranges is not None and len(self._ranges) else None

    def _restart(self) -> None:
        if self.ranges is not None:
            self.generation += 1
        self._clear()


class ExpertCountsTail(CountsTail):
    """Reader of the new records of expert_counts.bin since the last call. A restarted file is read again."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / COUNTS_FILE
        super().__init__()

    def _clear(self) -> None:
        super()._clear()
        self._header: CountsHeader | None = None
        self._identity: tuple[int, int] | None = None
        self._num_read = 0
        self._last_record = 0
        self._fingerprint = b""

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

    def _read(self, file: BinaryIO) -> None:
        status = os.fstat(file.fileno())
        header = read_counts_header(file)
        start = file.tell()
        if header is None:
            self._restart()
            # A new run may not have written the whole first line.
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
        self._header = header
        self.layers = header.layers
        self._identity = identity
        stride = max(1, -(-(num_records - self._num_read) * record.itemsize // MAX_READ_BYTES))
        self.is_sampled |= stride > 1
        for i in range(self._num_read, num_records, stride):
            file.seek(start + i * record.itemsize)
            content = file.read(record.itemsize)
            if len(content) < record.itemsize:
                # Truncated after the size was read: the next call starts again.
                return
            row = np.frombuffer(content, record)
            self._ranges.append(int(row["step"][0]), row["counts"][0].astype(np.float64))
            self._num_read = i + 1
            self._fingerprint = row.tobytes()[:_FINGERPRINT_BYTES]
            self._last_record = i

    def _continues(
        self, file: BinaryIO, header: CountsHeader, start: int, identity: tuple[int, int], num_records: int
    ) -> bool:
        """Return whether the file still has the last record that was read, at the same position."""
        if not self._num_read:
            return True
        if header != self._header or identity != self._identity or num_records < self._num_read:
            return False
        file.seek(start + self._last_record * header.record_dtype.itemsize)
        return file.read(len(self._fingerprint)) == self._fingerprint


def make_ranges(num_layers: int, num_experts: int) -> StepRanges:
    """Return ranges for counts [L, E], as many as `MAX_CELLS` allows."""
    num_ranges = max(2, min(MAX_RANGES, MAX_CELLS // (num_layers * num_experts)) // 2 * 2)
    return StepRanges((num_layers, num_experts), num_ranges)


MAX_READ_CHOICES = 1 << 24
"""Maximum expert choices per call, a tenth of a second. For a larger step, only the first samples are read."""


class TraceTail(CountsTail):
    """Counter of the choices in the new steps of a trace since the last call. A truncated trace is read again."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        super().__init__()

    def _clear(self) -> None:
        super()._clear()
        self._shape: TraceShape | None = None
        self.has_more = False
        """True if the last call stopped at its limit."""
        self.last_step = -1
        """Last step that was read. -1: none."""
        self._last_read: tuple[Path, int] | None = None

    def read(self) -> None:
        """Read the new steps."""
        if not (self._run_dir / TRACE_FOLDER / MANIFEST).is_file():
            self._restart()
            return
        try:
            trace = RoutingTrace(self._run_dir, "trace")
            if not self._continues(trace.shape):
                self._restart()
            self._read(trace)
            self.problem = ""
        except (ConfigError, RunError, OSError) as error:
            self.problem = f"{TRACE_FOLDER}/ cannot be read: {error}"

    def _read(self, trace: RoutingTrace) -> None:
        shape = trace.shape
        if not shape.layers:
            return
        self._shape = shape
        self.layers = shape.layers
        if self._ranges is None:
            self._ranges = make_ranges(len(shape.layers), shape.num_routed_experts)
        self.has_more = False
        budget = MAX_READ_CHOICES
        for step in trace.steps:
            if step <= self.last_step:
                continue
            if budget <= 0:
                self.has_more = True
                return
            counts, num_choices = self._count(trace.step(step), shape, step)
            budget -= num_choices
            self._ranges.append(step, counts)
            self.last_step = step
            path = step_file(trace.folder, step)
            self._last_read = (path, path.stat().st_mtime_ns)

    def _count(self, traced: TracedStep, shape: TraceShape, step: int) -> tuple[Array, int]:
        """Return the counts of a step, float64 [L, E], and the number of choices that were read."""
        per_sample = len(shape.layers) * shape.seq_len * shape.top_k
        num_samples = max(1, min(shape.global_batch_size, MAX_READ_CHOICES // per_sample))
        self.is_sampled |= num_samples < shape.global_batch_size
        counts = [
            shape.count_experts(traced.samples(layer, 0, num_samples), step) for layer in range(len(shape.layers))
        ]
        return np.array(counts, dtype=np.float64), num_samples * per_sample

    def _continues(self, shape: TraceShape) -> bool:
        """Return whether the last step that was read still exists unchanged."""
        if self._last_read is None:
            return True
        path, modified_ns = self._last_read
        return shape == self._shape and path.is_file() and path.stat().st_mtime_ns == modified_ns
