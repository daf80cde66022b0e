"""Search within one pipeline: memory strategy, ZeRO stage and placement of the moments. Torch-free.

`search.py` explains why the bounds hold.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from math import inf

import numpy as np
from numpy.typing import NDArray

from moefold.config.groups.dispatcher import DispatcherPart
from moefold.planner.cost_model.step import STEP_OVERHEAD_S, Seconds
from moefold.planner.cost_model.strategy import PassTimes, StrategyCosts
from moefold.planner.mapping import OFFLOADED_OPTIMIZER, ParallelMapping
from moefold.planner.memory.activations import MemoryStrategy
from moefold.planner.memory.budget import MemoryBudget, MemoryModel
from moefold.planner.search.space import HOST, Fold, MappingSpace, PipelineVariant

ByteArray = NDArray[np.float64]
FIRST_BATCH_SIZE = 64
BATCH_GROWTH = 4
"""Size of the first batch of memory strategies, and the growth factor of the following ones."""
TimedMapping = tuple[float, ParallelMapping]
"""Seconds of a step, and its mapping."""


@dataclass(frozen=True, slots=True)
class MicroBatchChoice:
    """A micro-batch size, a dispatcher and overlap in a fold."""

    lower_bound_s: float
    """Lower bound of a step's seconds: its layers alone."""
    mbs: int
    dispatcher: DispatcherPart
    overlap: bool
    pipelines: tuple[PipelineVariant, ...]


@dataclass(frozen=True, slots=True)
class StrategyBatch:
    """A batch of memory strategies of a choice."""

    indices: NDArray[np.intp]
    """Ascending indices into the space's strategies."""
    seconds: Seconds
    """Lower bound of a step's seconds under each strategy."""
    lower_bound_s: float
    """Minimum of `seconds`."""

    def below(self, limit: float) -> NDArray[np.intp]:
        """Return the indices of the strategies that may take less than a limit."""
        return self.indices[self.seconds < limit]


@dataclass(frozen=True, slots=True)
class PricedChoice:
    """A choice with the times of all its pipelines under some strategies."""

    choice: MicroBatchChoice
    indices: NDArray[np.intp]
    """Indices of these strategies in the space's."""
    pass_times: PassTimes
    saved: ByteArray
    """Bytes of each activation column under each strategy, [strategies, columns]."""
    activations: ByteArray
    """Activation bytes at two snapshots of each pipeline, [pipelines, 2, strategies]."""
    may_fit: NDArray[np.bool_]
    """True where some sharding and placement of the moments may fit, [pipelines, strategies]."""
    lower_bounds_s: tuple[float, ...]
    """Lower bound in seconds of each pipeline; inf where nothing fits."""


@dataclass(frozen=True, slots=True)
class _ShardingChoice:
    """ZeRO stage and placement of the moments in one pipeline, with the strategies that may fit, fastest first."""

    mapping: ParallelMapping
    indices: NDArray[np.intp]
    """Indices of the strategies in `PricedChoice.indices`."""
    seconds: Seconds

    @property
    def lower_bound_s(self) -> float:
        """Seconds of the fastest strategy."""
        return float(self.seconds[0])


class FoldCosts:
    """Times and memory of the mappings of a space, fold by fold.

    Args:
        space: the legal mappings.
        strategy_costs: their times.
        memory_model: their memory.
    """

    def __init__(self, space: MappingSpace, strategy_costs: StrategyCosts, memory_model: MemoryModel) -> None:
        self.space = space
        self.strategy_costs = strategy_costs
        self.memory_model = memory_model
        self._persistent: dict[tuple[object, ...], ByteArray] = {}
        self._peak_candidates: dict[tuple[object, ...], tuple[ByteArray, ByteArray]] = {}
        self._min_over_pipelines_cache: dict[tuple[object, ...], tuple[ByteArray, ByteArray]] = {}

    def lower_bound_plain(self, fold: Fold, choice: MicroBatchChoice) -> tuple[float, float]:
        """Return lower bounds of a choice's step seconds, as if everything fitted, and of its sends and bubble."""
        plain = self.strategy_costs.plain_pass_times(build_mapping(fold, choice, choice.pipelines[0]), choice.pipelines)
        return float(plain.seconds.min()) + STEP_OVERHEAD_S, float(plain.sends_and_bubble.min())

    def strategy_batches(
        self, fold: Fold, choice: MicroBatchChoice, sends_and_bubble_s: float, limit: float
    ) -> list[StrategyBatch]:
        """Return the strategies of a choice that may fit below a limit, in batches, fastest bounds first.

        The best mapping of a fold is mostly in the first batch, and excludes most of the others.

        Args:
            fold: the degrees.
            choice: a choice of the fold.
            sends_and_bubble_s: lower bound in seconds of sends and bubble.
            limit: limit in seconds.
        """
        seconds = self._lower_bound_fitting(fold, choice) + sends_and_bubble_s
        which = np.flatnonzero(seconds < limit)
        if len(which) > FIRST_BATCH_SIZE:
            # Stable: equal strategies keep their order.
            which = which[np.argsort(seconds[which], kind="stable")]
        found = []
        start = 0
        size = FIRST_BATCH_SIZE
        while start < len(which):
            some = np.sort(which[start : start + size])
            found.append(
                StrategyBatch(some, seconds[some], float(seconds[which[start]] if start else seconds[some].min()))
            )
            start = start + size
            size = BATCH_GROWTH * size
        return found

    def _lower_bound_fitting(self, fold: Fold, choice: MicroBatchChoice) -> Seconds:
        """Return a lower bound of the step seconds under each strategy, without bubbles and sends; inf if none fits."""
        strategies = self.space.strategies
        probe = build_mapping(fold, choice, choice.pipelines[0])
        memory = self.memory_model
        state_counts, activations = self._min_over_pipelines(fold, choice, probe)
        n = self.num_micro_batches(fold, choice)
        bounds = []
        # One byte of tolerance, so that rounding excludes nothing that fits.
        free = memory.device.memory_bytes + 1 - memory.workspace(probe)
        headrooms = free - self.persistent_bytes(fold, choice, self.space.zero_stages) @ state_counts.T
        for placement, headroom in zip(self.placements(self.space.zero_stages), headrooms, strict=True):
            if headroom.min() > 0:
                m = build_mapping(fold, choice, choice.pipelines[0], *placement)
                bounds.append((self.strategy_costs.lower_bound_data_parallel_s(m, choice.pipelines, n), headroom))
        data_parallel_s = np.full(len(strategies), inf)
        for seconds, headroom in sorted(bounds, key=lambda way: -way[0]):
            data_parallel_s[(activations <= headroom[:, None]).all(axis=0)] = seconds
        lower_bounds: Seconds = (
            self.strategy_costs.lower_bound_passes(probe, strategies) + data_parallel_s + STEP_OVERHEAD_S
        )
        return lower_bounds

    def _min_over_pipelines(
        self, fold: Fold, choice: MicroBatchChoice, probe: ParallelMapping
    ) -> tuple[ByteArray, ByteArray]:
        """Return the minimum over all pipelines, at two snapshots, of state counts and activation bytes.

        They are [2, columns] and [2, strategies], and the same for many degrees of the experts.
        """
        # Neither snapshot lies in an overlapped pair, so the sizes are those without overlap, which are fewer.
        candidates_key = self._peak_candidates_key(fold, choice)
        activation_memory = self.memory_model.activation_memory
        probe = replace(probe, overlap=False)
        key = (candidates_key, activation_memory.cache_key(probe), choice.mbs, fold.cp)
        if key not in self._min_over_pipelines_cache:
            state_counts, activation_counts = (rows.min(axis=0) for rows in self.peak_candidates(fold, choice))
            self._min_over_pipelines_cache[key] = (
                state_counts,
                activation_counts @ activation_memory.total_bytes(probe, self.space.strategies).T,
            )
        return self._min_over_pipelines_cache[key]

    def price_choice(
        self, fold: Fold, choice: MicroBatchChoice, indices: NDArray[np.intp] | None = None
    ) -> PricedChoice:
        """Price all pipelines of a choice under the strategies of the given indices; None: under all."""
        strategies = self.space.strategies
        probe = build_mapping(fold, choice, choice.pipelines[0])
        indices = np.arange(len(strategies)) if indices is None else indices
        passes = self.strategy_costs.pass_times(probe, choice.pipelines, strategies, indices)
        saved = self.memory_model.activation_memory.total_bytes(probe, strategies)[indices]
        state_counts, activation_counts = self.peak_candidates(fold, choice)
        activations = activation_counts @ saved.T
        persistent = self.persistent_bytes(fold, choice, self.space.zero_stages).min(axis=0)
        may_fit = self.fits(state_counts @ persistent + self.memory_model.workspace(probe), activations)
        lower_bounds = np.where(may_fit, passes.seconds, inf).min(axis=1) + STEP_OVERHEAD_S
        return PricedChoice(choice, indices, passes, saved, activations, may_fit, tuple(lower_bounds.tolist()))

    def fits(self, persistent: ByteArray, activations: ByteArray) -> NDArray[np.bool_]:
        """Return which strategies fit at the given snapshots, [..., strategies].

        Args:
            persistent: bytes of states and workspace, [..., snapshots].
            activations: bytes of activations, [..., snapshots, strategies].
        """
        totals = (persistent[..., None] + activations).max(axis=-2)
        found: NDArray[np.bool_] = totals <= self.memory_model.device.memory_bytes
        return found

    def placements(self, zero_stages: tuple[int, ...]) -> tuple[tuple[int, str], ...]:
        """Return all pairs of a ZeRO stage and a placement of the moments."""
        return tuple(product(zero_stages, self.space.optimizer_placements))

    def persistent_bytes(self, fold: Fold, choice: MicroBatchChoice, zero_stages: tuple[int, ...]) -> ByteArray:
        """Return the bytes of each state column for each of `placements`, [placements, columns]."""
        key = (fold, self.num_micro_batches(fold, choice) > 1, zero_stages)
        if key not in self._persistent:
            mappings = [
                build_mapping(fold, choice, choice.pipelines[0], *placement)
                for placement in self.placements(zero_stages)
            ]
            self._persistent[key] = np.array([self.memory_model.persistent_bytes(m) for m in mappings])
        return self._persistent[key]

    def num_micro_batches(self, fold: Fold, choice: MicroBatchChoice) -> int:
        """Return the micro-batches of a step."""
        return self.strategy_costs.cost_model.workload.global_batch_size // (choice.mbs * fold.dp)

    def peak_candidates(self, fold: Fold, choice: MicroBatchChoice) -> tuple[ByteArray, ByteArray]:
        """Return the state and activation counts at two snapshots of each pipeline, [pipelines, 2, columns] each."""
        key = self._peak_candidates_key(fold, choice)
        if key not in self._peak_candidates:
            found = [
                self.memory_model.peak_candidates(build_mapping(fold, choice, pipeline))
                for pipeline in choice.pipelines
            ]
            self._peak_candidates[key] = (
                np.array([one.states for one in found]),
                np.array([one.activations for one in found]),
            )
        return self._peak_candidates[key]

    def _peak_candidates_key(self, fold: Fold, choice: MicroBatchChoice) -> tuple[object, ...]:
        """Return the cache key of `peak_candidates`."""
        return (fold.pp, fold.dp * choice.mbs, choice.overlap, choice.pipelines)


class PipelineChoice:
    """The mappings of one pipeline of a choice.

    Args:
        fold_costs: times and memory of the space.
        fold: the degrees.
        priced_choice: the choice.
        index: index of the pipeline.
    """

    def __init__(self, fold_costs: FoldCosts, fold: Fold, priced_choice: PricedChoice, index: int) -> None:
        base = priced_choice.choice
        self._pipeline = priced_choice.choice.pipelines[index]
        self._fold_costs = fold_costs
        self._fold = fold
        self._choice = base
        self._priced_choice = priced_choice
        self._num_micro_batches = fold_costs.num_micro_batches(fold, base)
        self._zero_stages = fold_costs.space.legal_zero_stages(
            fold, base.mbs, self._pipeline.schedule, base.dispatcher, base.overlap
        )
        self._pass_times = priced_choice.pass_times.of_pipeline(index)
        self._may_fit = priced_choice.may_fit[index]
        self._states = fold_costs.peak_candidates(fold, base)[0][index]
        self._activations = priced_choice.activations[index]
        self._sharding_choices: list[_ShardingChoice] = []

    @cached_property
    def _memory_budget(self) -> MemoryBudget:
        """Memory of the pipeline, computed on demand: finding its snapshots is slow."""
        priced = self._priced_choice
        costs = self._fold_costs
        mapping = build_mapping(self._fold, self._choice, self._pipeline)
        return costs.memory_model.memory_budget(
            mapping, priced.saved, costs.space.strategies.recomputes_comm[priced.indices]
        )

    def lower_bound_s(self, limit: float) -> float:
        """Return a lower bound in seconds of the mappings that may fit below a limit; inf if there is none.

        A mapping may fit if it fits at two snapshots of the step.
        """
        costs = self._fold_costs
        some = np.flatnonzero(self._may_fit & (self._pass_times.seconds + STEP_OVERHEAD_S < limit))
        if not some.size:
            return inf
        passes = self._pass_times.select(some)
        activations = self._activations[:, some]
        persistent = costs.persistent_bytes(self._fold, self._choice, self._zero_stages) @ self._states.T
        workspace = costs.memory_model.workspace(build_mapping(self._fold, self._choice, self._pipeline))
        fits = costs.fits(persistent + workspace, activations)
        placements = costs.placements(self._zero_stages)
        for number in np.flatnonzero(fits.any(axis=1)):
            m = build_mapping(self._fold, self._choice, self._pipeline, *placements[number])
            seconds = costs.strategy_costs.add_data_parallel_s(passes, m, self._num_micro_batches)
            below_limit = np.flatnonzero(fits[number] & (seconds < limit))
            if below_limit.size:
                # Stable: equal strategies keep their order.
                below_limit = below_limit[np.argsort(seconds[below_limit], kind="stable")]
                self._sharding_choices.append(_ShardingChoice(m, some[below_limit], seconds[below_limit]))
        self._sharding_choices.sort(key=lambda way: way.lower_bound_s)
        return self._sharding_choices[0].lower_bound_s if self._sharding_choices else inf

    def fastest(self, limit: float) -> TimedMapping | None:
        """Return the fastest mapping below a limit that fits, or None; call `lower_bound_s` first."""
        best = None
        for sharding in self._sharding_choices:
            number = self._first_that_fits(sharding, limit)
            if number is not None:
                limit = float(sharding.seconds[number])
                best = limit, _with_strategy(sharding.mapping, self._strategy(sharding.indices[number]))
        return best

    def _first_that_fits(self, sharding: "_ShardingChoice", limit: float) -> int | None:
        """Return the index of the fastest strategy below a limit that fits; None if there is none."""
        memory = self._fold_costs.memory_model
        count = int(np.searchsorted(sharding.seconds, limit))
        start = 0
        size = FIRST_BATCH_SIZE
        while start < count:
            which = sharding.indices[start : min(start + size, count)]
            totals = self._memory_budget.totals(sharding.mapping, self._memory_budget.activations(which))
            fits = np.flatnonzero(totals <= memory.device.memory_bytes)
            if fits.size:
                return start + int(fits[0])
            start = start + size
            size = BATCH_GROWTH * size
        return None

    def min_memory(self) -> tuple[float, ParallelMapping]:
        """Return the smallest memory with full sharding and offloaded moments, and its mapping."""
        m = build_mapping(self._fold, self._choice, self._pipeline, *self._fold_costs.placements(self._zero_stages)[-1])
        totals = self._memory_budget.totals(m, self._memory_budget.activations())
        return float(totals.min()), _with_strategy(m, self._strategy(np.argmin(totals)))

    def _strategy(self, number: np.intp) -> MemoryStrategy:
        """Return the strategy at an index of `PricedChoice.indices`."""
        return self._fold_costs.space.strategies[int(self._priced_choice.indices[number])]


def build_mapping(
    fold: Fold, choice: MicroBatchChoice, pipeline: PipelineVariant, zero: int = 0, optimizer_placement: str = "none"
) -> ParallelMapping:
    """Build the mapping of the choices on all levels, without recomputation."""
    return ParallelMapping(
        tp=fold.tp,
        cp=fold.cp,
        dp=fold.dp,
        pp=fold.pp,
        vpp=pipeline.vpp,
        ep=fold.ep,
        etp=fold.etp,
        edp=fold.edp,
        mbs=choice.mbs,
        zero=zero,
        offload=(OFFLOADED_OPTIMIZER,) if optimizer_placement == HOST else (),
        dispatcher=choice.dispatcher,
        overlap=choice.overlap,
        schedule=pipeline.schedule,
    )


def _with_strategy(mapping: ParallelMapping, strategy: MemoryStrategy) -> ParallelMapping:
    recompute, offload = strategy
    return replace(mapping, recompute=recompute, offload=(*offload, *mapping.offload))
