"""Incremental reader of a routing trace: counts of experts for runs without expert_counts.bin. Torch-free."""

from pathlib import Path

import numpy as np

from moefold.board.expert_tail import make_ranges
from moefold.board.step_ranges import StepRanges
from moefold.config.moe import TRACE_FOLDER
from moefold.data.routing_trace import MANIFEST, RoutingTrace, TracedStep, TraceShape, step_file
from moefold.errors import ConfigError, RunError
from moefold.metrics.expert_balance import Array

MAX_READ_CHOICES = 1 << 24
"""Expert choices that one call reads: a tenth of a second. Of a larger step, the first samples are read."""


class TraceTail:
    """Counts the choices of the steps that a trace gained since the last call; a trace cut short is read again."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self.generation = 0
        self._clear()

    def _clear(self) -> None:
        self.shape: TraceShape | None = None
        self.problem = ""
        self.is_sampled = False
        """Of some step only the first samples of its batch were read."""
        self.has_more = False
        """The last call stopped at its limit."""
        self._last_read: tuple[Path, int] | None = None
        self._last_step = -1
        self._ranges: StepRanges | None = None

    @property
    def ranges(self) -> StepRanges | None:
        """Mean counts over ranges of steps, [ranges, L, E]; None as long as no step was read."""
        return self._ranges if self._ranges is not None and len(self._ranges) else None

    @property
    def last_step(self) -> int:
        """Last step that was read; -1 for none."""
        return self._last_step

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

    def _restart(self) -> None:
        if self._last_step >= 0:
            self.generation += 1
        self._clear()

    def _read(self, trace: RoutingTrace) -> None:
        shape = trace.shape
        if not shape.layers:
            return
        self.shape = shape
        if self._ranges is None:
            self._ranges = make_ranges(len(shape.layers), shape.num_experts)
        self.has_more = False
        budget = MAX_READ_CHOICES
        for step in trace.steps:
            if step <= self._last_step:
                continue
            if budget <= 0:
                self.has_more = True
                return
            counts, num_choices = self._count(trace.step(step), shape, step)
            budget -= num_choices
            self._ranges.append(step, counts)
            self._last_step = step
            path = step_file(trace.folder, step)
            self._last_read = (path, path.stat().st_mtime_ns)

    def _count(self, traced: TracedStep, shape: TraceShape, step: int) -> tuple[Array, int]:
        """Return the counts of a step, float64 [L, E], and how many choices were read."""
        per_sample = len(shape.layers) * shape.seq_len * shape.top_k
        num_samples = max(1, min(shape.global_batch_size, MAX_READ_CHOICES // per_sample))
        self.is_sampled |= num_samples < shape.global_batch_size
        counts = [
            np.bincount(
                shape.check_expert_indices(traced.samples(layer, 0, num_samples), step, "the trace").ravel(),
                minlength=shape.num_experts,
            )
            for layer in range(len(shape.layers))
        ]
        return np.array(counts, dtype=np.float64), num_samples * per_sample

    def _continues(self, shape: TraceShape) -> bool:
        """Return whether the step that was read last is still there, unchanged."""
        if self._last_read is None:
            return True
        path, modified_ns = self._last_read
        return shape == self.shape and path.is_file() and path.stat().st_mtime_ns == modified_ns
