"""What is left to choose in one pipeline: what saves activations, what is sharded, where moments live. Torch-free.

`search.py` says why its bounds hold.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from math import inf

import numpy as np
from numpy.typing import NDArray

from moefold.plan.kept import Saver
from moefold.plan.mapping import OPTIMIZER, Mapping
from moefold.plan.memory import Memory, Room
from moefold.plan.saver_time import Passes, SaverTimes
from moefold.plan.space import HOST, Fold, MappingSpace, Pipeline
from moefold.plan.step_time import STEP_S, Seconds

Bytes = NDArray[np.float64]
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
    """A base with the prices of all its pipelines and of some savers."""

    base: Base
    which: NDArray[np.intp]
    """Numbers of these savers among those of the space."""
    savers: tuple[Saver, ...]
    passes: Passes
    kept: Bytes
    """Bytes of each column of activations with each saver, [savers, columns]."""
    may_fit: NDArray[np.bool_]
    """[pipelines, savers]"""
    least: tuple[float, ...]
    """Seconds of each pipeline at least; inf where nothing fits."""


class FoldPrices:
    """What prices the mappings of the folds of a space.

    Args:
        space: the legal mappings.
        times: their times.
        memory: their memory.
    """

    def __init__(self, space: MappingSpace, times: SaverTimes, memory: Memory) -> None:
        self.space, self.times, self.memory = space, times, memory
        self._resting: dict[tuple[object, ...], Bytes] = {}
        self._heaviest: dict[tuple[object, ...], tuple[Bytes, Bytes]] = {}

    def least_fitting(self, fold: Fold, base: Base) -> Seconds:
        """Seconds at least of what may fit with each saver, bubbles and sends left out; inf if nothing does."""
        savers, probe = self.space.savers, mapping_of(fold, base, base.pipelines[0])
        held, active = (rows.min(axis=0) for rows in self._heaviest_of(fold, base))
        may_fit = self._may_fit(fold, base, (held, active), self.memory.kept.totals(probe, savers))
        least: Seconds = np.where(may_fit, self.times.least_passes(probe, savers), inf) + STEP_S
        return least

    def open(self, fold: Fold, base: Base, which: NDArray[np.intp] | None = None) -> Opened:
        """Price all pipelines of a base, which has some, with the savers of some numbers; None: with all."""
        savers, probe = self.space.savers, mapping_of(fold, base, base.pipelines[0])
        which = np.arange(len(savers)) if which is None else which
        passes = self.times.passes(probe, base.pipelines, savers, which)
        kept = self.memory.kept.totals(probe, savers)[which]
        may_fit = self._may_fit(fold, base, self._heaviest_of(fold, base), kept)
        least = np.where(may_fit, passes.seconds, inf).min(axis=1) + STEP_S
        some = tuple(savers[number] for number in which)
        return Opened(base, which, some, passes, kept, may_fit, tuple(least.tolist()))

    def _may_fit(self, fold: Fold, base: Base, moments: tuple[Bytes, Bytes], kept: Bytes) -> NDArray[np.bool_]:
        """Which savers fit in some moments, however weights are sharded and wherever moments live, [..., savers]."""
        held, active = moments
        resting = held @ self.least_resting_bytes(fold, base, self.space.zeros) + self.memory.workspace
        totals = (resting[..., None] + active @ kept.T).max(axis=-2)
        found: NDArray[np.bool_] = totals <= self.memory.device.memory_bytes
        return found

    def least_resting_bytes(self, fold: Fold, base: Base, zeros: tuple[int, ...]) -> Bytes:
        """Bytes of each column of weights, gradients and moments, however sharded and wherever the moments live."""
        key = (fold, self.num_micro_batches(fold, base) > 1, zeros)
        if key not in self._resting:
            stages = self.stages(fold, base, base.pipelines[0], zeros)
            self._resting[key] = np.min([self.memory.resting_bytes(m) for m in stages], axis=0)
        return self._resting[key]

    def stages(self, fold: Fold, base: Base, pipeline: Pipeline, zeros: tuple[int, ...]) -> tuple[Mapping, ...]:
        """The mappings of a pipeline without savers: what is sharded, and where the moments live."""
        homes = self.space.moment_homes
        return tuple(mapping_of(fold, base, pipeline, zero, home) for zero in zeros for home in homes)

    def num_micro_batches(self, fold: Fold, base: Base) -> int:
        """Of a step."""
        return self.times.pricer.workload.global_batch_size // (base.size * fold.dp)

    def _heaviest_of(self, fold: Fold, base: Base) -> tuple[Bytes, Bytes]:
        """What is held and active in two moments of each pipeline, [pipelines, 2, columns] each."""
        key = (fold.pp, fold.dp * base.size, base.overlap, base.pipelines)
        if key not in self._heaviest:
            found = [self.memory.heaviest(mapping_of(fold, base, pipeline)) for pipeline in base.pipelines]
            self._heaviest[key] = np.array([one.held for one in found]), np.array([one.active for one in found])
        return self._heaviest[key]


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
        self._prices, self._fold, self._base, self._opened = prices, fold, base, opened
        self._n = prices.num_micro_batches(fold, base)
        self._zeros = prices.space.zeros_of(fold, base.size, self._pipeline.schedule, base.dispatcher, base.overlap)
        self._passes, self._may_fit = opened.passes.of(which), opened.may_fit[which]
        self._fitting = np.arange(0)
        self._activations = np.zeros((0, 0))

    @cached_property
    def _stages(self) -> tuple[Mapping, ...]:
        return self._prices.stages(self._fold, self._base, self._pipeline, self._zeros)

    @cached_property
    def _room(self) -> Room:
        """Made where it is asked for: the moments of a pipeline take long to find."""
        opened, mapping = self._opened, mapping_of(self._fold, self._base, self._pipeline)
        return self._prices.memory.room(mapping, opened.savers, opened.kept)

    def least_fitting(self, limit: float) -> float:
        """Seconds at least of what fits and may take less than a limit; inf if nothing does."""
        memory, passes = self._prices.memory, self._passes
        which = np.flatnonzero(self._may_fit & (passes.seconds + STEP_S < limit))
        if not which.size:
            return inf
        activations = self._room.activations(which)
        resting = self._prices.least_resting_bytes(self._fold, self._base, self._zeros)
        fits = self._room.totals(resting, activations) <= memory.device.memory_bytes
        self._fitting, self._activations = which[fits], activations[:, fits]
        if not self._fitting.size:
            return inf
        self._passes = passes.at(self._fitting)
        return float(self._passes.seconds.min()) + STEP_S

    def fastest(self, limit: float) -> Timed | None:
        """The fastest below a limit that fits, if there is one; asked for after `least_fitting`."""
        prices, passes, best = self._prices, self._passes, None
        first = float(passes.seconds.min())
        for m in self._stages:
            if first + prices.times.pricer.replicas(m)[2] + STEP_S >= limit:
                continue
            seconds = prices.times.with_replicas(passes, m, self._n)
            if seconds.min() >= limit:
                continue
            totals = self._room.totals(prices.memory.resting_bytes(m), self._activations)
            seconds[totals > prices.memory.device.memory_bytes] = inf
            i = int(np.argmin(seconds))
            if seconds[i] < limit:
                limit = float(seconds[i])
                best = limit, _saved(m, self._saver(self._fitting[i]))
        return best

    def leanest(self) -> tuple[float, Mapping]:
        """Bytes of the mapping that needs least with all sharded and the moments elsewhere, and that mapping."""
        m = self._stages[-1]
        totals = self._room.totals(self._prices.memory.resting_bytes(m), self._room.activations())
        return float(totals.min()), _saved(m, self._saver(np.argmin(totals)))

    def _saver(self, number: np.intp) -> Saver:
        """The saver of a number among those that are open."""
        return self._prices.space.savers[int(self._opened.which[number])]


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
