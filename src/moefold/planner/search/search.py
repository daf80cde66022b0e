"""Search of the fastest mappings that fit: a beam over folds and micro-batch sizes.

A queue holds pairs of a fold and a micro-batch size, sorted by a lower bound of their seconds. The bound has the layers
of one micro-batch without recomputation and the least bubble, for all pairs at once. The search refines the lowest
bound, first by the pair's pipelines, data parallelism and optimizer, then by the memory strategies that may fit at
three snapshots of the step. A fully refined pair is priced: pipelines (schedules with virtual stages), ZeRO stages and
memory strategies together (`CostModel.pass_times`). The fastest is checked against the memory of all snapshots of its
step.

The search is a beam for each number of pipeline ranks: it looks at the memory of `BEAM` pairs. Mappings with few
pipeline ranks have the lowest bounds, and in large models they do not fit. `Search.gap` says how far the lowest bound
outside the beam is below the best mapping, 0 if none is. The search has not checked whether such a mapping fits.
`space.py` lists the mappings. `tests/planner/search/test_search.py` compares with pricing every mapping.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from heapq import heapify, heappop, heappush
from itertools import chain, count, groupby, product, takewhile
from math import inf
from operator import itemgetter
from typing import NamedTuple

import numpy as np

from moefold.config.groups.context import ContextPart
from moefold.cost.memoised import all_arguments, memoised
from moefold.planner.cost_model.step import STEP_OVERHEAD_S, CostModel, Seconds, StepTime
from moefold.planner.mapping import ParallelMapping, PipelineVariant
from moefold.planner.memory.activations import has_own_memory
from moefold.planner.memory.budget import MemoryEstimate
from moefold.planner.search.bounds import PairBounds, plain_pipelines
from moefold.planner.search.constraints import FOLD_DEGREES, FOLDED, METHODS, Fold
from moefold.planner.search.memory_filter import (
    PLAIN_PIPELINE,
    MemoryFilter,
    MicroBatchChoice,
    small_pipelines,
    with_strategy,
)

BEAM = 300
"""Most pairs of a fold and a micro-batch size whose memory a pass of the search looks at, for each number of pipeline
ranks."""
MAX_PASSES = 4
"""Passes of the search, each over the mappings that the pass before left out, for targets without a mapping."""
MAX_PIPELINES = 8
"""Pipelines that are priced for a fold with a micro-batch size and a dispatcher: the fastest without recomputation, and
1F1B, which holds the fewest activations."""
ALL_ZERO_STAGES = (0, 1, 2, 3)

TimedMapping = tuple[float, ParallelMapping]
"""Seconds of a step, and its mapping."""
Candidate = tuple[float, int, ParallelMapping, Seconds, bool]
"""A mapping under all memory strategies: the least seconds, a number, the mapping without a strategy, the seconds with
each, inf where it does not fit, [strategies], and whether all snapshots of the step decided that, or only three."""


@dataclass(frozen=True, slots=True)
class PlannedMapping:
    """A mapping with its predicted time and memory."""

    mapping: ParallelMapping
    time: StepTime
    memory: MemoryEstimate
    attention: ContextPart | None = None
    """Sharing of the attention of documents among the ranks. None: as the recipe says."""

    @property
    def fold(self) -> Fold:
        """The degrees."""
        return Fold(*(getattr(self.mapping, axis) for axis in FOLD_DEGREES))

    @property
    def sort_key(self) -> tuple[bool, float, float]:
        """Sort key, best first: mappings that fit, then fast ones, then those with less memory."""
        return not self.memory.fits, self.time.total_s, self.memory.total

    @property
    def bottleneck(self) -> str:
        """The part of the step that takes longest, and "memory" if saving memory costs time."""
        pays = "memory" if self.mapping.recompute or self.mapping.zero > 1 else ""
        return " + ".join(filter(None, (self.time.bottleneck.replace("_", " "), pays)))


@dataclass(frozen=True)
class SearchTarget:
    """Target of a search: its best mapping of each of some folds, among the mappings that it accepts."""

    count: int = 1
    """Folds to find."""
    accepts: Callable[[Fold], bool] = METHODS[FOLDED].accepts
    zero_stages: tuple[int, ...] = ALL_ZERO_STAGES
    title: str = ""
    """Name for display."""
    limit_s: float = inf
    """Seconds that a mapping has to beat."""


class _Node(NamedTuple):
    """An entry of the queue: a fold with a micro-batch size."""

    bound_s: float
    pair: int
    """Number of the fold with its micro-batch size, as in `_PairBounds`."""
    variant: int = -1
    """Index in `Search.variants`, or -1 if none is chosen yet."""
    passes_s: float = -1.0
    """Seconds of a step's micro-batches with the fastest pipeline. -1: not computed yet."""
    has_memory: bool = False
    """True if the bound takes memory into account."""


class _TargetResults:
    """The best mappings of a target so far, for each variant of a search one for each fold."""

    def __init__(self, target: SearchTarget, variants: Sequence["Search"]) -> None:
        self.target = target
        self.limit_s = target.limit_s
        """Seconds that another fold has to beat."""
        self.best: dict[Search, dict[Fold, TimedMapping]] = {variant: {} for variant in variants}
        self.accepts = cache(target.accepts)
        # Variants may take equally long but for rounding.
        self._tie = 1 + 1e-9 if len(variants) > 1 else 1.0

    @property
    def is_empty(self) -> bool:
        """True if no mapping was found yet."""
        return not any(self.best.values())

    def limit_of(self, variant: "Search") -> float:
        """Return the seconds that another fold of a variant has to beat."""
        return min(self.limit_s, self._last_of_count(seconds for seconds, _ in self.best[variant].values()))

    def add(self, fold: Fold, timed: TimedMapping, variant: "Search") -> None:
        """Add a mapping of a fold if it is the best of the fold and the variant."""
        best = self.best[variant]
        if timed[0] < best.get(fold, (inf,))[0]:
            best[fold] = timed
            least: dict[Fold, float] = {}
            for own, (seconds, _) in chain.from_iterable(folds.items() for folds in self.best.values()):
                least[own] = min(seconds, least.get(own, inf))
            self.limit_s = min(self.limit_s, self._last_of_count(least.values()) * self._tie)

    def _last_of_count(self, seconds: Iterable[float]) -> float:
        """Return the longest of the best folds of the target, infinite as long as there are fewer."""
        return next(iter(sorted(seconds)[self.target.count - 1 : self.target.count]), inf)

    def plans(self) -> list[PlannedMapping]:
        """Return the best mappings of each variant with their prices, best first."""
        return [
            variant.price(m)
            for variant, best in self.best.items()
            for _, m in sorted(best.values(), key=lambda timed: timed[0])[: self.target.count]
        ]


class Search:
    """Search of the best mappings of a space.

    Args:
        attention: way to share the attention of documents, for display, or None for the way of the recipe.
        variants: searches of the same folds, micro-batch sizes and dispatchers whose cost models have this search's
            lower bounds. Each mapping is priced by all of them. Empty: only by this search.
    """

    def __init__(
        self,
        cost_model: CostModel,
        memory: MemoryFilter,
        attention: ContextPart | None = None,
        variants: Sequence["Search"] = (),
    ) -> None:
        self.cost_model = cost_model
        self.attention = attention
        self.variants = tuple(variants) or (self,)
        self.memory = memory
        self.space = memory.space
        self.memory_model = memory.memory_model
        self.gap = 0.0
        """Gap from the best step down to the lowest bound outside the last beam, as a fraction of the step."""
        self.bounds = PairBounds(cost_model, memory, BEAM)
        self._global_batch_size = cost_model.workload.global_batch_size

    def find(self, targets: Sequence[SearchTarget]) -> list[list[PlannedMapping]]:
        """Return the best mappings of each target that fit, best first, each of another fold."""
        found = [_TargetResults(target, self.variants) for target in targets]
        queue = self._pairs() if any(variant.memory.any_fits for variant in self.variants) else iter(())
        for number_of_pass in count():
            skipped = self._search_pass(queue, [results for results in found if results.is_empty])
            queue = iter(skipped)
            lowest_s = skipped[0].bound_s if skipped else inf
            is_complete = all(not results.is_empty or lowest_s >= results.limit_s for results in found)
            has_any = any(not results.is_empty or results.limit_s < inf for results in found)
            if is_complete or (number_of_pass >= MAX_PASSES and has_any):
                break
        limit_s = min((results.limit_s for results in found), default=inf)
        self.gap = max(0.0, 1 - lowest_s / limit_s) if limit_s < inf else 0.0
        return [sorted(results.plans(), key=lambda plan: plan.sort_key) for results in found]

    def _pairs(self) -> Iterator["_Node"]:
        """Yield all pairs, lowest bound first."""
        bounds = self.bounds.table.bounds
        return (_Node(float(bounds[pair]), pair) for pair in np.argsort(bounds, kind="stable").tolist())

    def _search_pass(self, pairs: Iterator["_Node"], found: Sequence["_TargetResults"]) -> list["_Node"]:
        """Search pairs for the best mappings of targets. Return the pairs outside the beam. Both have sorted bounds."""
        skipped = []
        taken = Counter[int]()
        refined: list[_Node] = []
        following = next(pairs, None)
        while refined or following:
            if following and not (refined and refined[0] < following):
                node = following
                following = next(pairs, None)
            else:
                node = heappop(refined)
            bound = node.bound_s
            if bound >= max(results.limit_s for results in found):
                break
            fold, _ = self.bounds.fold_of(node.pair)
            own = [results for results in found if bound < results.limit_s and results.accepts(fold)]
            if not own:
                continue
            if node.has_memory:
                self.variants[node.variant]._price_pair(self.bounds.sized_fold(node.pair), own)
                continue
            if node.passes_s < 0:
                taken[fold.pp] += 1
                if taken[fold.pp] > BEAM:
                    skipped.append(node)
                    continue
            for closer in self._refine(node, own):
                heappush(refined, closer)
        return skipped

    def plans_below(
        self,
        limit_s: float,
        zero_stages: tuple[int, ...] = ALL_ZERO_STAGES,
        accepts: Callable[[Fold], bool] = METHODS[FOLDED].accepts,
        *,
        is_beam: bool = False,
    ) -> list[PlannedMapping]:
        """Return the best mapping of each accepted fold that takes less than `limit_s` and fits.

        In a beam, only `MAX_PIPELINES` of each fold are priced.
        """
        target = SearchTarget(self.space.num_folds, accepts, zero_stages, limit_s=limit_s)
        found = _TargetResults(target, self.variants)
        table = self.bounds.table
        pairs = np.flatnonzero(table.size_bounds < limit_s)
        by_fold = pairs[np.lexsort((table.size_bounds[pairs], table.folds[pairs]))].tolist()
        for _, own in groupby(by_fold, table.folds.__getitem__):
            first = next(own)
            fold, _ = self.bounds.fold_of(first)
            for pair in chain((first,), own) if accepts(fold) else ():
                bound = float(table.size_bounds[pair])
                for variant in self.variants:
                    if bound < found.best[variant].get(fold, (limit_s,))[0]:
                        variant._price_pair(self.bounds.sized_fold(pair), [found], is_beam=is_beam)
        return found.plans()

    def folds_below(self, limit_s: float) -> set[Fold]:
        """Return the folds with a mapping that takes less than `limit_s` and fits."""
        found: set[Fold] = set()
        pairs = [node.pair for node in takewhile(lambda node: node.bound_s < limit_s, self._pairs())]
        # Most folds have such a mapping among the pipelines with least activations. The others are tried after that.
        for is_small, pair in product((True, False), pairs):
            sized_fold = self.bounds.sized_fold(pair)
            if sized_fold[0] in found or self.bounds.step_bound(pair, ALL_ZERO_STAGES)[1] >= limit_s:
                continue
            if any(one._beats(limit_s, *sized_fold, is_small=is_small) for one in self.variants):
                found.add(sized_fold[0])
        return found

    def _beats(
        self, limit_s: float, fold: Fold, size: int, pipelines: tuple[PipelineVariant, ...], *, is_small: bool
    ) -> bool:
        """Return whether a mapping with a micro-batch size takes less than `limit_s` and fits.

        Args:
            is_small: whether it is enough to look where `small_pipelines` may fit, and at 1F1B.
        """
        if is_small and self._least_recompute_s(fold, size, pipelines, ALL_ZERO_STAGES) == inf:
            return False
        strategies = self.space.strategies
        capacity = self.memory_model.device.memory_bytes
        limits: dict[tuple[int, ...], float] = {ALL_ZERO_STAGES: limit_s}
        for choice in chain(*(self._choices(fold, size, pipelines, overlap) for overlap in (False, True))):
            for m, seconds in self._candidates(choice, limits, 0 if is_small else len(pipelines)):
                which = np.flatnonzero(seconds < limit_s)
                if len(which) and (self.memory_model.totals(m, strategies, which) <= capacity).any():
                    return True
        return False

    def price(self, mapping: ParallelMapping) -> PlannedMapping:
        """Return any mapping with its time and memory."""
        time = self.cost_model.step_time(mapping)
        return PlannedMapping(mapping, time, self.memory_model.estimate(mapping), self.attention)

    def _refine(self, node: "_Node", own: Sequence["_TargetResults"]) -> Iterator["_Node"]:
        """Yield the nodes with closer bounds that replace a node, below the limits of some targets."""
        zeros = {zero for results in own for zero in results.target.zero_stages}
        limit_s = max(results.limit_s for results in own)
        if node.variant >= 0:
            variant = self.variants[node.variant]
            bound = (
                node.passes_s + variant._least_recompute_s(*self.bounds.sized_fold(node.pair), zeros) + STEP_OVERHEAD_S
            )
            refined = [node._replace(bound_s=max(node.bound_s, bound), has_memory=True)]
        elif node.passes_s < 0:
            passes_s, bound = self.bounds.step_bound(node.pair, zeros)
            number = 0 if self.cost_model.lower_bounds is self.cost_model else -1
            refined = [_Node(max(node.bound_s, bound), node.pair, number, passes_s)]
        else:
            # The attention of documents is planned only where its lower bound may win.
            refined = []
            for number, variant in enumerate(self.variants):
                passes_s, bound = self.bounds.step_bound_under(variant.cost_model, node.pair, zeros)
                refined.append(_Node(max(node.bound_s, bound), node.pair, number, passes_s))
        yield from (closer for closer in refined if closer.bound_s < limit_s)

    def _price_pair(
        self,
        sized_fold: tuple[Fold, int, tuple[PipelineVariant, ...]],
        own: Sequence["_TargetResults"],
        *,
        is_beam: bool = True,
    ) -> None:
        """Add the best mappings of a fold and a micro-batch size that fit to targets."""
        limits: dict[tuple[int, ...], float] = {}
        for results in own:
            stages = results.target.zero_stages
            limits[stages] = max(limits.get(stages, -inf), results.limit_of(self))
        found = self._fastest_that_fit(*sized_fold, limits, is_beam=is_beam)
        for results in own:
            timed = found.get(results.target.zero_stages)
            if timed is not None:
                results.add(sized_fold[0], timed, self)

    def _least_recompute_s(
        self, fold: Fold, size: int, pipelines: tuple[PipelineVariant, ...], zeros: Collection[int]
    ) -> float:
        """Return the least seconds of recomputation in a step with some ZeRO stages that may fit, or inf."""
        # Overlap needs no less memory than none.
        choices = self._choices(fold, size, pipelines, False) or self._choices(fold, size, pipelines, True)
        if not choices:
            return inf
        probe = choices[0].mapping()
        choices = [choice._replace(pipelines=small_pipelines(choice.pipelines)) for choice in choices]
        may_fit = np.any([self.memory.may_fit(choice).any(axis=0) for choice in choices], axis=0)
        may_fit &= np.array([[zero in zeros] for zero, _ in self.memory.placements])
        if not may_fit.any():
            return inf
        # Recomputation takes the same time with all dispatchers, or less with the fastest.
        seconds = self.cost_model.model_s(probe, self.space.strategies)
        extra = (seconds - seconds.min())[may_fit.any(axis=0)].min()
        return probe.num_micro_batches(self._global_batch_size) / probe.pp * float(extra)

    @memoised(all_arguments)
    def _choices(
        self, fold: Fold, size: int, pipelines: tuple[PipelineVariant, ...], overlap: bool
    ) -> list[MicroBatchChoice]:
        """Return the dispatchers to look at, fastest first, and the pipelines that are legal with them."""
        plain = plain_pipelines(fold, pipelines)
        fastest = inf
        found = []
        choices = [
            MicroBatchChoice(fold, size, dispatcher, overlap) for dispatcher in self.bounds.dispatchers(fold, size)
        ]
        times = (float(self.cost_model.model_s(choice.mapping())) for choice in choices)
        for seconds, choice in sorted(zip(times, choices, strict=True), key=itemgetter(0)):
            legal = self.space.legal_pipelines(fold, size, plain, choice.dispatcher, overlap)
            if not legal:
                continue
            # Most dispatchers save the same tensors, so the fastest of them is enough.
            has_own = has_own_memory(choice.dispatcher)
            if seconds < fastest or has_own and self.memory_model.activation_memory.may_need_less(choice.mapping()):
                found.append(choice._replace(pipelines=legal))
                fastest = fastest if has_own else seconds
        return found

    def _fastest_that_fit(
        self,
        fold: Fold,
        size: int,
        pipelines: tuple[PipelineVariant, ...],
        limits: Mapping[tuple[int, ...], float],
        *,
        is_beam: bool,
    ) -> dict[tuple[int, ...], TimedMapping]:
        """Return the fastest mappings with a micro-batch size that fit, by the ZeRO stages that they may have.

        Args:
            limits: seconds of a step that a mapping with some of these ZeRO stages has to beat.
            is_beam: whether to price only `MAX_PIPELINES`, as long as the mappings that pass three snapshots fit.
        """
        found: dict[tuple[int, ...], TimedMapping] = {}
        queue: list[Candidate] = []
        bounds = dict(limits)
        for choice in chain(*(self._choices(fold, size, pipelines, overlap) for overlap in (False, True))):
            for m, seconds in self._candidates(choice, bounds, MAX_PIPELINES if is_beam else len(pipelines)):
                queue.append((float(seconds.min()), len(queue), m, seconds, False))
                if is_beam:
                    # In a beam only the fastest counts: if it does not fit, all are priced.
                    least_s = queue[-1][0]
                    bounds |= {zeros: min(limit_s, least_s) for zeros, limit_s in bounds.items() if m.zero in zeros}
        heapify(queue)
        capacity = self.memory_model.device.memory_bytes
        while queue and len(found) < len(limits):
            least_s, number, m, seconds, is_exact = heappop(queue)
            wanted = [
                zeros
                for zeros, limit_s in limits.items()
                if m.zero in zeros and zeros not in found and least_s < limit_s
            ]
            if not wanted:
                continue
            strategies = self.space.strategies
            fastest = np.array([seconds.argmin()])
            if is_exact or (self.memory_model.totals(m, strategies, fastest) <= capacity).any():
                found |= dict.fromkeys(wanted, (least_s, with_strategy(m, strategies, int(fastest[0]))))
            elif is_beam:
                return self._fastest_that_fit(fold, size, pipelines, limits, is_beam=False)
            else:
                others = np.flatnonzero(seconds < inf)
                seconds[others[self.memory_model.totals(m, strategies, others) > capacity]] = inf
                heappush(queue, (float(seconds.min()), number, m, seconds, True))
        return found

    def _candidates(
        self, choice: MicroBatchChoice, limits: Mapping[tuple[int, ...], float], max_pipelines: int
    ) -> Iterator[tuple[ParallelMapping, Seconds]]:
        """Yield the mappings of a choice without a strategy, and their seconds with each, inf where it cannot win."""
        limit_s = max(limits.values()) - STEP_OVERHEAD_S
        plain = self.cost_model.pass_times(choice.mapping(), choice.pipelines).seconds
        places = [i for i in np.argsort(plain[:, 0], kind="stable").tolist() if plain[i, 0] < limit_s]
        places = [i for k, i in enumerate(places) if k < max_pipelines or choice.pipelines[i] == PLAIN_PIPELINE]
        if not places:
            return
        choice = choice._replace(pipelines=tuple(choice.pipelines[i] for i in sorted(places)))
        passes = self.cost_model.pass_times(choice.mapping(), choice.pipelines, self.space.strategies)
        is_fast = passes.seconds + STEP_OVERHEAD_S < max(limits.values())
        may_win = self.memory.may_fit(choice) & is_fast[:, None]
        dispatch = choice.dispatcher, choice.overlap
        for i, number in np.argwhere(may_win.any(axis=2)).tolist():
            pipeline = choice.pipelines[i]
            zero, moments = self.memory.placements[number]
            limit_s = max((limit for stages, limit in limits.items() if zero in stages), default=-inf)
            wins = may_win[i, number] & (passes.seconds[i] + STEP_OVERHEAD_S < limit_s)
            zeros = self.space.legal_zero_stages(choice.fold, choice.mbs, pipeline.schedule, *dispatch)
            if zero in zeros and wins.any():
                m = choice.mapping(pipeline, zero, moments)
                yield m, np.where(wins, self.cost_model.step_s(passes, m, i), inf)

    def smallest_plan(self) -> PlannedMapping:
        """Return the mapping of least memory. The space has one."""
        return self.price(self.memory.smallest[1])
