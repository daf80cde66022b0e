"""What is left to choose in one pipeline: what saves activations, what is sharded, where moments live. Torch-free.

`search.py` says why its bounds hold.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from math import inf

import numpy as np
from numpy.typing import NDArray

from moefold.planner.cost_model.step import STEP_OVERHEAD_S, Seconds
from moefold.planner.cost_model.strategy import PassTimes, StrategyCosts
from moefold.planner.mapping import OFFLOADED_OPTIMIZER, ParallelMapping
from moefold.planner.memory.activations import MemoryStrategy
from moefold.planner.memory.budget import MemoryBudget, MemoryModel
from moefold.planner.search.space import HOST, Fold, MappingSpace, PipelineVariant

ByteArray = NDArray[np.float64]
FIRST_BATCH_SIZE = 64
BATCH_GROWTH = 4
"""Savers that are looked into at first, and how many times as many after them."""
TimedMapping = tuple[float, ParallelMapping]
"""Seconds of a step, and what takes them."""


@dataclass(frozen=True, slots=True)
class MicroBatchChoice:
    """A micro-batch size, a dispatcher and overlap of a fold."""

    lower_bound_s: float
    """What the layers of a step take at least."""
    mbs: int
    dispatcher: str
    overlap: bool
    pipelines: tuple[PipelineVariant, ...]


@dataclass(frozen=True, slots=True)
class StrategyBatch:
    """Some savers of a base."""

    indices: NDArray[np.intp]
    """Their numbers among those of the space, ascending."""
    seconds: Seconds
    """Of a step with each at least."""
    lower_bound_s: float
    """Of those."""

    def below(self, limit: float) -> NDArray[np.intp]:
        """The numbers of those that may take less than a limit."""
        return self.indices[self.seconds < limit]


@dataclass(frozen=True, slots=True)
class PricedChoice:
    """A base with the prices of all its pipelines and of some savers."""

    choice: MicroBatchChoice
    indices: NDArray[np.intp]
    """Numbers of these savers among those of the space."""
    pass_times: PassTimes
    saved: ByteArray
    """Bytes of each column of activations with each saver, [savers, columns]."""
    activations: ByteArray
    """Of activations in two moments of each pipeline, [pipelines, 2, savers]."""
    may_fit: NDArray[np.bool_]
    """However weights are sharded and wherever moments live, [pipelines, savers]."""
    lower_bounds_s: tuple[float, ...]
    """Seconds of each pipeline at least; inf where nothing fits."""


@dataclass(frozen=True, slots=True)
class _ShardingChoice:
    """What is sharded in one pipeline and where its moments live, with the savers that go with it, fastest first."""

    mapping: ParallelMapping
    indices: NDArray[np.intp]
    """Their numbers among those that are open."""
    seconds: Seconds

    @property
    def lower_bound_s(self) -> float:
        """Of the first of them."""
        return float(self.seconds[0])


class FoldCosts:
    """What prices the mappings of the folds of a space.

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
        """Seconds at least of a step of a base, as if everything fitted, and those of its sends and bubble."""
        plain = self.strategy_costs.plain_pass_times(build_mapping(fold, choice, choice.pipelines[0]), choice.pipelines)
        return float(plain.seconds.min()) + STEP_OVERHEAD_S, float(plain.sends_and_bubble.min())

    def strategy_batches(
        self, fold: Fold, choice: MicroBatchChoice, sends_and_bubble_s: float, limit: float
    ) -> list[StrategyBatch]:
        """The savers of a base that may fit and take less than a limit, those that seem fastest first.

        The best of a fold is mostly among the first, and what it takes leaves most others out.

        Args:
            fold: the degrees.
            choice: of the fold.
            sends_and_bubble_s: seconds that sends and the bubble take at least.
            limit: in seconds.
        """
        seconds = self._lower_bound_fitting(fold, choice) + sends_and_bubble_s
        which = np.flatnonzero(seconds < limit)
        if len(which) > FIRST_BATCH_SIZE:
            # Of equal ones the first stay first.
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
        """Seconds at least of what may fit with each saver, bubbles and sends left out; inf if nothing does."""
        savers = self.space.strategies
        probe = build_mapping(fold, choice, choice.pipelines[0])
        memory = self.memory_model
        held, active = self._min_over_pipelines(fold, choice, probe)
        n = self.num_micro_batches(fold, choice)
        ways = []
        # A byte more, so that rounding leaves out nothing that fits.
        free = memory.device.memory_bytes + 1 - memory.workspace(probe)
        rooms = free - self.persistent_bytes(fold, choice, self.space.zero_stages) @ held.T
        for home, room in zip(self.placements(self.space.zero_stages), rooms, strict=True):
            if room.min() > 0:
                m = build_mapping(fold, choice, choice.pipelines[0], *home)
                ways.append((self.strategy_costs.lower_bound_data_parallel_s(m, choice.pipelines, n), room))
        shown = np.full(len(savers), inf)
        for seconds, room in sorted(ways, key=lambda way: -way[0]):
            shown[(active <= room[:, None]).all(axis=0)] = seconds
        least: Seconds = self.strategy_costs.lower_bound_passes(probe, savers) + shown + STEP_OVERHEAD_S
        return least

    def _min_over_pipelines(
        self, fold: Fold, choice: MicroBatchChoice, probe: ParallelMapping
    ) -> tuple[ByteArray, ByteArray]:
        """The least of any pipeline in two moments: counts of states, [2, columns], and of activations with each saver.

        Those are bytes, [2, savers]; the same for many degrees of the experts.
        """
        # Neither of the two is a moment of a pair, so the sizes are those without overlap, of which there are fewer.
        heaviest = self._peak_candidates_key(fold, choice)
        kept = self.memory_model.activation_memory
        probe = replace(probe, overlap=False)
        key = (heaviest, kept.cache_key(probe), choice.mbs, fold.cp)
        if key not in self._min_over_pipelines_cache:
            held, active = (rows.min(axis=0) for rows in self.peak_candidates(fold, choice))
            self._min_over_pipelines_cache[key] = held, active @ kept.total_bytes(probe, self.space.strategies).T
        return self._min_over_pipelines_cache[key]

    def price_choice(
        self, fold: Fold, choice: MicroBatchChoice, indices: NDArray[np.intp] | None = None
    ) -> PricedChoice:
        """Price all pipelines of a base, which has some, with the savers of some numbers; None: with all."""
        savers = self.space.strategies
        probe = build_mapping(fold, choice, choice.pipelines[0])
        indices = np.arange(len(savers)) if indices is None else indices
        passes = self.strategy_costs.pass_times(probe, choice.pipelines, savers, indices)
        kept = self.memory_model.activation_memory.total_bytes(probe, savers)[indices]
        held, active = self.peak_candidates(fold, choice)
        of_savers = active @ kept.T
        resting = self.persistent_bytes(fold, choice, self.space.zero_stages).min(axis=0)
        may_fit = self.fits(held @ resting + self.memory_model.workspace(probe), of_savers)
        least = np.where(may_fit, passes.seconds, inf).min(axis=1) + STEP_OVERHEAD_S
        return PricedChoice(choice, indices, passes, kept, of_savers, may_fit, tuple(least.tolist()))

    def fits(self, persistent: ByteArray, activations: ByteArray) -> NDArray[np.bool_]:
        """Which savers fit in some moments, [..., savers].

        Args:
            resting: bytes of states and of the workspace, [..., moments].
            activations: bytes of activations, [..., moments, savers].
        """
        totals = (persistent[..., None] + activations).max(axis=-2)
        found: NDArray[np.bool_] = totals <= self.memory_model.device.memory_bytes
        return found

    def placements(self, zero_stages: tuple[int, ...]) -> tuple[tuple[int, str], ...]:
        """What may be sharded with where the moments may live."""
        return tuple(product(zero_stages, self.space.optimizer_placements))

    def persistent_bytes(self, fold: Fold, choice: MicroBatchChoice, zero_stages: tuple[int, ...]) -> ByteArray:
        """Bytes of each column of weights, gradients and moments with each of `placements`, [homes, columns]."""
        key = (fold, self.num_micro_batches(fold, choice) > 1, zero_stages)
        if key not in self._persistent:
            mappings = [
                build_mapping(fold, choice, choice.pipelines[0], *home) for home in self.placements(zero_stages)
            ]
            self._persistent[key] = np.array([self.memory_model.persistent_bytes(m) for m in mappings])
        return self._persistent[key]

    def num_micro_batches(self, fold: Fold, choice: MicroBatchChoice) -> int:
        """Of a step."""
        return self.strategy_costs.cost_model.workload.global_batch_size // (choice.mbs * fold.dp)

    def peak_candidates(self, fold: Fold, choice: MicroBatchChoice) -> tuple[ByteArray, ByteArray]:
        """What is held and active in two moments of each pipeline, [pipelines, 2, columns] each."""
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
        """What `peak_candidates` depends on."""
        return (fold.pp, fold.dp * choice.mbs, choice.overlap, choice.pipelines)


class PipelineChoice:
    """The mappings of one pipeline of a base.

    Args:
        fold_costs: of the space.
        fold: the degrees.
        priced_choice: the base.
        which: number of the pipeline.
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
        """Made where it is asked for: the moments of a pipeline take long to find."""
        opened = self._priced_choice
        prices = self._fold_costs
        mapping = build_mapping(self._fold, self._choice, self._pipeline)
        return prices.memory_model.memory_budget(
            mapping, opened.saved, prices.space.strategies.recomputes_comm[opened.indices]
        )

    def lower_bound_s(self, limit: float) -> float:
        """Seconds of what may fit and takes less than a limit; inf if nothing does.

        It may fit if it does in two moments of the step.
        """
        prices = self._fold_costs
        some = np.flatnonzero(self._may_fit & (self._pass_times.seconds + STEP_OVERHEAD_S < limit))
        if not some.size:
            return inf
        passes = self._pass_times.select(some)
        active = self._activations[:, some]
        resting = prices.persistent_bytes(self._fold, self._choice, self._zero_stages) @ self._states.T
        workspace = prices.memory_model.workspace(build_mapping(self._fold, self._choice, self._pipeline))
        fits = prices.fits(resting + workspace, active)
        homes = prices.placements(self._zero_stages)
        for number in np.flatnonzero(fits.any(axis=1)):
            m = build_mapping(self._fold, self._choice, self._pipeline, *homes[number])
            seconds = prices.strategy_costs.add_data_parallel_s(passes, m, self._num_micro_batches)
            near = np.flatnonzero(fits[number] & (seconds < limit))
            if near.size:
                # Of equal ones the first stay first.
                near = near[np.argsort(seconds[near], kind="stable")]
                self._sharding_choices.append(_ShardingChoice(m, some[near], seconds[near]))
        self._sharding_choices.sort(key=lambda way: way.lower_bound_s)
        return self._sharding_choices[0].lower_bound_s if self._sharding_choices else inf

    def fastest(self, limit: float) -> TimedMapping | None:
        """The fastest below a limit that fits, if there is one; asked for after `least`."""
        best = None
        for way in self._sharding_choices:
            number = self._first_that_fits(way, limit)
            if number is not None:
                limit = float(way.seconds[number])
                best = limit, _with_strategy(way.mapping, self._strategy(way.indices[number]))
        return best

    def _first_that_fits(self, sharding: "_ShardingChoice", limit: float) -> int | None:
        """Number of the fastest that fits, of those below a limit."""
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
        """Bytes of the mapping that needs least with all sharded and the moments elsewhere, and that mapping."""
        m = build_mapping(self._fold, self._choice, self._pipeline, *self._fold_costs.placements(self._zero_stages)[-1])
        totals = self._memory_budget.totals(m, self._memory_budget.activations())
        return float(totals.min()), _with_strategy(m, self._strategy(np.argmin(totals)))

    def _strategy(self, number: np.intp) -> MemoryStrategy:
        """The saver of a number among those that are open."""
        return self._fold_costs.space.strategies[int(self._priced_choice.indices[number])]


def build_mapping(
    fold: Fold, choice: MicroBatchChoice, pipeline: PipelineVariant, zero: int = 0, optimizer_placement: str = "none"
) -> ParallelMapping:
    """The mapping of the choices on all levels, with nothing made again."""
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
