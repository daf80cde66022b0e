"""What is left to choose in one pipeline: what saves activations, what is sharded, where moments live. Torch-free.

`search.py` says why its bounds hold.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
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
FIRST_SAVERS, GROWTH = 64, 4
"""Savers that are looked into at first, and how many times as many after them."""
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
class Portion:
    """Some savers of a base."""

    which: NDArray[np.intp]
    """Their numbers among those of the space, ascending."""
    seconds: Seconds
    """Of a step with each at least."""
    least: float
    """Of those."""

    def below(self, limit: float) -> NDArray[np.intp]:
        """The numbers of those that may take less than a limit."""
        return self.which[self.seconds < limit]


@dataclass(frozen=True, slots=True)
class Opened:
    """A base with the prices of all its pipelines and of some savers."""

    base: Base
    which: NDArray[np.intp]
    """Numbers of these savers among those of the space."""
    passes: Passes
    kept: Bytes
    """Bytes of each column of activations with each saver, [savers, columns]."""
    active: Bytes
    """Of activations in two moments of each pipeline, [pipelines, 2, savers]."""
    may_fit: NDArray[np.bool_]
    """However weights are sharded and wherever moments live, [pipelines, savers]."""
    least: tuple[float, ...]
    """Seconds of each pipeline at least; inf where nothing fits."""


@dataclass(frozen=True, slots=True)
class _Way:
    """What is sharded in one pipeline and where its moments live, with the savers that go with it, fastest first."""

    mapping: Mapping
    which: NDArray[np.intp]
    """Their numbers among those that are open."""
    seconds: Seconds

    @property
    def least(self) -> float:
        """Of the first of them."""
        return float(self.seconds[0])


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
        self._light: dict[tuple[object, ...], tuple[Bytes, Bytes]] = {}

    def least_plain(self, fold: Fold, base: Base) -> tuple[float, float]:
        """Seconds at least of a step of a base, as if everything fitted, and those of its sends and bubble."""
        plain = self.times.plain_passes(mapping_of(fold, base, base.pipelines[0]), base.pipelines)
        return float(plain.seconds.min()) + STEP_S, float(plain.beside.min())

    def portions(self, fold: Fold, base: Base, beside_s: float, limit: float) -> list[Portion]:
        """The savers of a base that may fit and take less than a limit, those that seem fastest first.

        The best of a fold is mostly among the first, and what it takes leaves most others out.

        Args:
            fold: the degrees.
            base: of the fold.
            beside_s: seconds that sends and the bubble take at least.
            limit: in seconds.
        """
        seconds = self._least_fitting(fold, base) + beside_s
        which = np.flatnonzero(seconds < limit)
        if len(which) > FIRST_SAVERS:
            # Of equal ones the first stay first.
            which = which[np.argsort(seconds[which], kind="stable")]
        found, start, size = [], 0, FIRST_SAVERS
        while start < len(which):
            some = np.sort(which[start : start + size])
            found.append(Portion(some, seconds[some], float(seconds[which[start]] if start else seconds[some].min())))
            start, size = start + size, GROWTH * size
        return found

    def _least_fitting(self, fold: Fold, base: Base) -> Seconds:
        """Seconds at least of what may fit with each saver, bubbles and sends left out; inf if nothing does."""
        savers, probe, memory = self.space.savers, mapping_of(fold, base, base.pipelines[0]), self.memory
        held, active = self._lightest(fold, base, probe)
        n, ways = self.num_micro_batches(fold, base), []
        # A byte more, so that rounding leaves out nothing that fits.
        free = memory.device.memory_bytes + 1 - memory.workspace(probe)
        rooms = free - self.resting(fold, base, self.space.zeros) @ held.T
        for home, room in zip(self.homes(self.space.zeros), rooms, strict=True):
            if room.min() > 0:
                m = mapping_of(fold, base, base.pipelines[0], *home)
                ways.append((self.times.least_replicas_s(m, base.pipelines, n), room))
        shown = np.full(len(savers), inf)
        for seconds, room in sorted(ways, key=lambda way: -way[0]):
            shown[(active <= room[:, None]).all(axis=0)] = seconds
        least: Seconds = self.times.least_passes(probe, savers) + shown + STEP_S
        return least

    def _lightest(self, fold: Fold, base: Base, probe: Mapping) -> tuple[Bytes, Bytes]:
        """The least of any pipeline in two moments: counts of states, [2, columns], and of activations with each saver.

        Those are bytes, [2, savers]; the same for many degrees of the experts.
        """
        # Neither of the two is a moment of a pair, so the sizes are those without overlap, of which there are fewer.
        heaviest, kept, probe = self._heaviest_key(fold, base), self.memory.kept, replace(probe, overlap=False)
        key = (heaviest, kept.key(probe), base.size, fold.cp)
        if key not in self._light:
            held, active = (rows.min(axis=0) for rows in self.heaviest_of(fold, base))
            self._light[key] = held, active @ kept.totals(probe, self.space.savers).T
        return self._light[key]

    def open(self, fold: Fold, base: Base, which: NDArray[np.intp] | None = None) -> Opened:
        """Price all pipelines of a base, which has some, with the savers of some numbers; None: with all."""
        savers, probe = self.space.savers, mapping_of(fold, base, base.pipelines[0])
        which = np.arange(len(savers)) if which is None else which
        passes = self.times.passes(probe, base.pipelines, savers, which)
        kept = self.memory.kept.totals(probe, savers)[which]
        held, active = self.heaviest_of(fold, base)
        of_savers = active @ kept.T
        resting = self.resting(fold, base, self.space.zeros).min(axis=0)
        may_fit = self.fits(held @ resting + self.memory.workspace(probe), of_savers)
        least = np.where(may_fit, passes.seconds, inf).min(axis=1) + STEP_S
        return Opened(base, which, passes, kept, of_savers, may_fit, tuple(least.tolist()))

    def fits(self, resting: Bytes, active: Bytes) -> NDArray[np.bool_]:
        """Which savers fit in some moments, [..., savers].

        Args:
            resting: bytes of states and of the workspace, [..., moments].
            active: bytes of activations, [..., moments, savers].
        """
        totals = (resting[..., None] + active).max(axis=-2)
        found: NDArray[np.bool_] = totals <= self.memory.device.memory_bytes
        return found

    def homes(self, zeros: tuple[int, ...]) -> tuple[tuple[int, str], ...]:
        """What may be sharded with where the moments may live."""
        return tuple(product(zeros, self.space.moment_homes))

    def resting(self, fold: Fold, base: Base, zeros: tuple[int, ...]) -> Bytes:
        """Bytes of each column of weights, gradients and moments with each of `homes`, [homes, columns]."""
        key = (fold, self.num_micro_batches(fold, base) > 1, zeros)
        if key not in self._resting:
            mappings = [mapping_of(fold, base, base.pipelines[0], *home) for home in self.homes(zeros)]
            self._resting[key] = np.array([self.memory.resting_bytes(m) for m in mappings])
        return self._resting[key]

    def num_micro_batches(self, fold: Fold, base: Base) -> int:
        """Of a step."""
        return self.times.pricer.workload.global_batch_size // (base.size * fold.dp)

    def heaviest_of(self, fold: Fold, base: Base) -> tuple[Bytes, Bytes]:
        """What is held and active in two moments of each pipeline, [pipelines, 2, columns] each."""
        key = self._heaviest_key(fold, base)
        if key not in self._heaviest:
            found = [self.memory.heaviest(mapping_of(fold, base, pipeline)) for pipeline in base.pipelines]
            self._heaviest[key] = np.array([one.held for one in found]), np.array([one.active for one in found])
        return self._heaviest[key]

    def _heaviest_key(self, fold: Fold, base: Base) -> tuple[object, ...]:
        """What `heaviest_of` depends on."""
        return (fold.pp, fold.dp * base.size, base.overlap, base.pipelines)


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
        self._held, self._active = prices.heaviest_of(fold, base)[0][which], opened.active[which]
        self._ways: list[_Way] = []

    @cached_property
    def _room(self) -> Room:
        """Made where it is asked for: the moments of a pipeline take long to find."""
        opened, prices, mapping = self._opened, self._prices, mapping_of(self._fold, self._base, self._pipeline)
        return prices.memory.room(mapping, opened.kept, prices.space.savers.pauses[opened.which])

    def least(self, limit: float) -> float:
        """Seconds of what may fit and takes less than a limit; inf if nothing does.

        It may fit if it does in two moments of the step.
        """
        prices = self._prices
        some = np.flatnonzero(self._may_fit & (self._passes.seconds + STEP_S < limit))
        if not some.size:
            return inf
        passes, active = self._passes.at(some), self._active[:, some]
        resting = prices.resting(self._fold, self._base, self._zeros) @ self._held.T
        workspace = prices.memory.workspace(mapping_of(self._fold, self._base, self._pipeline))
        fits = prices.fits(resting + workspace, active)
        homes = prices.homes(self._zeros)
        for number in np.flatnonzero(fits.any(axis=1)):
            m = mapping_of(self._fold, self._base, self._pipeline, *homes[number])
            seconds = prices.times.with_replicas(passes, m, self._n)
            near = np.flatnonzero(fits[number] & (seconds < limit))
            if near.size:
                # Of equal ones the first stay first.
                near = near[np.argsort(seconds[near], kind="stable")]
                self._ways.append(_Way(m, some[near], seconds[near]))
        self._ways.sort(key=lambda way: way.least)
        return self._ways[0].least if self._ways else inf

    def fastest(self, limit: float) -> Timed | None:
        """The fastest below a limit that fits, if there is one; asked for after `least`."""
        best = None
        for way in self._ways:
            number = self._first_that_fits(way, limit)
            if number is not None:
                limit = float(way.seconds[number])
                best = limit, _saved(way.mapping, self._saver(way.which[number]))
        return best

    def _first_that_fits(self, way: "_Way", limit: float) -> int | None:
        """Number of the fastest that fits, of those below a limit."""
        memory, count = self._prices.memory, int(np.searchsorted(way.seconds, limit))
        start, size = 0, FIRST_SAVERS
        while start < count:
            which = way.which[start : min(start + size, count)]
            totals = self._room.totals(way.mapping, self._room.activations(which))
            fits = np.flatnonzero(totals <= memory.device.memory_bytes)
            if fits.size:
                return start + int(fits[0])
            start, size = start + size, GROWTH * size
        return None

    def leanest(self) -> tuple[float, Mapping]:
        """Bytes of the mapping that needs least with all sharded and the moments elsewhere, and that mapping."""
        m = mapping_of(self._fold, self._base, self._pipeline, *self._prices.homes(self._zeros)[-1])
        totals = self._room.totals(m, self._room.activations())
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
