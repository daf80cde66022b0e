"""What is left to choose in one pipeline: what saves activations, what is sharded, where moments live. Torch-free.

`search.py` says why its bounds hold.
"""

from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf

import numpy as np
from numpy.typing import NDArray

from moefold.plan.kept import Saver
from moefold.plan.mapping import OPTIMIZER, Mapping
from moefold.plan.memory import Memory
from moefold.plan.saver_time import Passes, SaverTimes
from moefold.plan.space import HOST, Fold, MappingSpace, Pipeline
from moefold.plan.step_time import STEP_S

Timed = tuple[float, Mapping]
"""Seconds of a step, and what takes them."""


@dataclass(frozen=True, slots=True)
class Base:
    """A micro-batch size, a dispatcher and overlap of a fold."""

    floor_s: float
    """What the layers of a step take at least."""
    size: int
    dispatcher: str
    overlap: bool
    pipelines: tuple[Pipeline, ...]


@dataclass(frozen=True, slots=True)
class Opened:
    """A base with the prices of all its pipelines and savers."""

    base: Base
    savers: tuple[Saver, ...]
    passes: Passes
    least: tuple[float, ...]
    """Seconds of each pipeline at least."""
    kept: NDArray[np.float64]
    """Bytes of each column of activations with each saver, [savers, columns]."""


@dataclass(frozen=True, slots=True)
class FoldPrices:
    """What prices the mappings of a fold."""

    space: MappingSpace
    times: SaverTimes
    memory: Memory
    least_resting: dict[tuple[object, ...], NDArray[np.float64]] = field(default_factory=dict)
    """Known answers of `PipelineChoice`."""

    def open(self, fold: Fold, base: Base) -> Opened:
        """Price all pipelines of a base, which has some, with all savers."""
        savers = self.space.savers_with(base.overlap)
        probe = mapping_of(fold, base, base.pipelines[0])
        passes = self.times.passes(probe, base.pipelines, savers)
        least = tuple((passes.seconds.min(axis=1) + STEP_S).tolist())
        return Opened(base, savers, passes, least, self.memory.kept.totals(probe, savers))


class PipelineChoice:
    """The mappings of one pipeline of a base.

    Args:
        prices: of the space.
        fold: the degrees.
        opened: the base.
        which: number of the pipeline.
    """

    def __init__(self, prices: FoldPrices, fold: Fold, opened: Opened, which: int) -> None:
        base, self._pipeline = opened.base, opened.base.pipelines[which]
        self._prices, self._fold, self._base, self._savers = prices, fold, base, opened.savers
        self._zeros = prices.space.zeros_of(fold, base.size, self._pipeline.schedule, base.dispatcher, base.overlap)
        self._passes = opened.passes.of(which)
        self._room = prices.memory.room(mapping_of(fold, base, self._pipeline), opened.kept)
        self._fitting = np.arange(0)
        self._activations = np.zeros((0, 0))

    @cached_property
    def _stages(self) -> tuple[Mapping, ...]:
        """The mappings without savers: what is sharded, and where the moments live."""
        return tuple(
            mapping_of(self._fold, self._base, self._pipeline, zero, home)
            for zero in self._zeros
            for home in self._prices.space.moment_homes
        )

    def least_fitting(self, limit: float) -> float:
        """Seconds at least of what fits and may take less than a limit; inf if nothing does."""
        memory, passes = self._prices.memory, self._passes
        which = np.flatnonzero(passes.seconds + STEP_S < limit)
        if not which.size:
            return inf
        activations = self._room.activations(which)
        totals = self._room.totals(self._least_resting_bytes(), activations)
        fits = totals <= memory.device.memory_bytes
        self._fitting, self._activations = which[fits], activations[:, fits]
        if not self._fitting.size:
            return inf
        self._passes = Passes(*(part[self._fitting] for part in (passes.seconds, passes.forward, passes.backward)))
        return float(self._passes.seconds.min()) + min(map(self._least_added, self._stages))

    def _least_resting_bytes(self) -> NDArray[np.float64]:
        """Bytes of each state column, however they are sharded and wherever moments live."""
        fold, base, known = self._fold, self._base, self._prices.least_resting
        has_rounds = self._prices.times.pricer.workload.global_batch_size > base.size * fold.dp
        key = (fold, has_rounds, self._zeros)
        if key not in known:
            known[key] = np.min([self._prices.memory.resting_bytes(m) for m in self._stages], axis=0)
        return known[key]

    def fastest(self, limit: float) -> Timed | None:
        """The fastest below a limit that fits, if there is one; asked for after `least_fitting`."""
        memory, best = self._prices.memory, None
        first = float(self._passes.seconds.min())
        for least, m in sorted(((self._least_added(m), m) for m in self._stages), key=lambda pair: pair[0]):
            if first + least >= limit:
                break
            seconds = self._prices.times.with_replicas(self._passes, m)
            if seconds.min() >= limit:
                continue
            totals = self._room.totals(memory.resting_bytes(m), self._activations)
            seconds[totals > memory.device.memory_bytes] = inf
            i = int(np.argmin(seconds))
            if seconds[i] < limit:
                limit = float(seconds[i])
                best = limit, _saved(m, self._savers[self._fitting[i]])
        return best

    def leanest(self) -> tuple[float, Mapping]:
        """Bytes of the mapping that needs least with all sharded and the moments elsewhere, and that mapping."""
        m = self._stages[-1]
        totals = self._room.totals(self._prices.memory.resting_bytes(m), self._room.activations())
        return float(totals.min()), _saved(m, self._savers[int(np.argmin(totals))])

    def _least_added(self, m: Mapping) -> float:
        """Seconds that data parallelism and the optimizer add at least: work hides most where it is longest."""
        times, passes = self._prices.times.pricer, self._passes
        gathers, gradients, optimizer = times.replicas(m)
        n = m.num_micro_batches(times.workload.global_batch_size)
        longest = float(passes.forward.max()), float(passes.backward.max())
        return float(times.shown_replicas_s(m, (gathers, gradients), *longest, n)) + optimizer + STEP_S


def mapping_of(fold: Fold, base: Base, pipeline: Pipeline, zero: int = 0, moments: str = "none") -> Mapping:
    """The mapping of the choices on all levels, with nothing made again."""
    return Mapping(
        tp=fold.tp,
        cp=fold.cp,
        dp=fold.dp,
        pp=fold.pp,
        vpp=pipeline.vpp,
        ep=fold.ep,
        etp=fold.etp,
        edp=fold.edp,
        mbs=base.size,
        zero=zero,
        offload=(OPTIMIZER,) if moments == HOST else (),
        dispatcher=base.dispatcher,
        overlap=base.overlap,
        schedule=pipeline.schedule,
    )


def _saved(m: Mapping, saver: Saver) -> Mapping:
    recompute, offload = saver
    return replace(m, recompute=recompute, offload=(*offload, *m.offload))
