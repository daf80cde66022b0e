"""Search of the fastest mappings that fit: a beam over folds and micro-batch sizes.

A queue holds folds, and pairs of a fold and a micro-batch size, sorted by a lower bound of their seconds. The bound has
the layers of one micro-batch without recomputation and the least bubble, for all folds at once. The search refines the
lowest bound, for a pair first by its pipelines, data parallelism and optimizer, then by the memory strategies that may
fit at three snapshots of the step. A fully refined pair is priced: pipelines (schedules with virtual stages), ZeRO
stages and memory strategies together (`CostModel.pass_times`). The fastest is checked against the memory of all
snapshots of its step.

The search is a beam for each number of pipeline ranks: it looks at the memory of `BEAM` pairs. Mappings with few
pipeline ranks have the lowest bounds, and in large models they do not fit. `Search.gap` says how far the lowest bound
outside the beam is below the best mapping, 0 if none is. The search has not checked whether such a mapping fits.
`space.py` lists the mappings. `tests/planner/search/test_search.py` compares with pricing every mapping.
"""

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from heapq import heapify, heappop, heappush
from itertools import chain, count
from math import inf
from operator import itemgetter
from typing import NamedTuple

import numpy as np

from moefold.config.chosen import default_part
from moefold.config.groups.context import ContextPart
from moefold.config.groups.dispatcher import DispatcherPart, overrides_any
from moefold.cost.memoised import all_arguments, memoised
from moefold.planner.cost_model.layer import stack_blocks
from moefold.planner.cost_model.step import STEP_OVERHEAD_S, CostModel, Seconds, StepTime
from moefold.planner.mapping import ParallelMapping, PipelineVariant
from moefold.planner.memory.activations import has_own_memory
from moefold.planner.memory.budget import MemoryEstimate
from moefold.planner.search.constraints import FOLD_DEGREES, FOLDED, METHODS, Fold
from moefold.planner.search.memory_filter import (
    PLAIN_PIPELINE,
    MemoryFilter,
    MicroBatchChoice,
    small_pipelines,
    with_strategy,
)
from moefold.planner.search.space import AttentionView
from moefold.topology.schedules import DEFAULT_SCHEDULE

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
    """An entry of the queue: a fold, or a fold with a micro-batch size."""

    bound_s: float
    order: int
    view: AttentionView
    fold: Fold
    mbs_index: int = -1
    """Index of the micro-batch size in the view. -1: none is chosen yet."""
    passes_s: float = -1.0
    """Seconds of a step's micro-batches with the fastest pipeline. -1: not computed yet."""
    has_memory: bool = False
    """True if the bound takes memory into account."""


class _TargetResults:
    """The best mappings of a target so far, one for each fold."""

    def __init__(self, target: SearchTarget) -> None:
        self.target = target
        self.limit_s = target.limit_s
        """Seconds that another fold has to beat."""
        self.best: dict[Fold, TimedMapping] = {}
        self.accepts = cache(target.accepts)

    def add(self, fold: Fold, timed: TimedMapping) -> None:
        """Add a mapping of a fold if it is the fold's best."""
        if timed[0] < self.best.get(fold, (inf,))[0]:
            self.best[fold] = timed
            seconds = sorted(seconds for seconds, _ in self.best.values())
            self.limit_s = min((self.limit_s, *seconds[self.target.count - 1 : self.target.count]))

    def mappings(self) -> list[ParallelMapping]:
        """Return the best mappings, best first."""
        return [m for _, m in sorted(self.best.values(), key=lambda timed: timed[0])[: self.target.count]]


class Search:
    """Search of the best mappings of a space."""

    def __init__(self, cost_model: CostModel, memory: MemoryFilter) -> None:
        self.cost_model = cost_model
        self.memory = memory
        self.space = memory.space
        self.memory_model = memory.memory_model
        self.gap = 0.0
        """Gap from the best step down to the lowest bound outside the last beam, as a fraction of the step."""
        self._global_batch_size = cost_model.workload.global_batch_size
        self._layer_bounds: dict[tuple[int, ...], tuple[float, DispatcherPart | None]] = {}
        """Results of `_add_layer_bounds` with their dispatchers, by `_layers_key`."""

    def find(self, targets: Sequence[SearchTarget]) -> list[list[PlannedMapping]]:
        """Return the best mappings of each target that fit, best first, each of another fold."""
        found = [_TargetResults(target) for target in targets]
        folds = self.space.folds if self.memory.any_fits else ()
        bounds = self._fold_bounds_s(folds)
        queue = [_Node(bound, i, view, fold) for i, (bound, (fold, view)) in enumerate(zip(bounds, folds, strict=True))]
        heapify(queue)
        for number_of_pass in count():
            queue = sorted(self._search_pass(queue, [results for results in found if not results.best]))
            lowest_s = queue[0].bound_s if queue else inf
            is_complete = all(results.best or lowest_s >= results.limit_s for results in found)
            has_any = any(results.best or results.limit_s < inf for results in found)
            if is_complete or (number_of_pass >= MAX_PASSES and has_any):
                break
        limit_s = min((results.limit_s for results in found), default=inf)
        self.gap = max(0.0, 1 - lowest_s / limit_s) if limit_s < inf else 0.0
        return [sorted(map(self.price, results.mappings()), key=lambda plan: plan.sort_key) for results in found]

    def _search_pass(self, queue: list["_Node"], found: Sequence["_TargetResults"]) -> list["_Node"]:
        """Search the queue for the best mappings of targets, and return the nodes outside the beam."""
        skipped = []
        taken = Counter[int]()
        while queue and (bound := queue[0].bound_s) < max(results.limit_s for results in found):
            node = heappop(queue)
            own = [results for results in found if bound < results.limit_s and results.accepts(node.fold)]
            if not own:
                continue
            if node.has_memory:
                self._price_node(node, own)
                continue
            if node.mbs_index >= 0 and node.passes_s < 0:
                taken[node.fold.pp] += 1
                if taken[node.fold.pp] > BEAM:
                    skipped.append(node)
                    continue
            for refined in self._refine(node, own):
                heappush(queue, refined)
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
        found = _TargetResults(SearchTarget(len(self.space.folds), accepts, zero_stages, limit_s=limit_s))
        for fold, view in self.space.folds:
            if not accepts(fold):
                continue
            for bound, mbs_index in sorted(zip(self._size_bounds_s(fold, view), count())):
                if bound < found.best.get(fold, (limit_s,))[0]:
                    self._price_node(_Node(bound, 0, view, fold, mbs_index), [found], is_beam=is_beam)
        return [self.price(m) for m in found.mappings()]

    def price(self, mapping: ParallelMapping) -> PlannedMapping:
        """Return any mapping with its time and memory."""
        return PlannedMapping(mapping, self.cost_model.step_time(mapping), self.memory_model.estimate(mapping))

    def _refine(self, node: "_Node", own: Sequence["_TargetResults"]) -> Iterator["_Node"]:
        """Yield the nodes with closer bounds that replace a node, below the limits of some targets."""
        sizes = node.view.pipelines_by_mbs
        if node.mbs_index < 0:
            for mbs_index, bound in enumerate(self._size_bounds_s(node.fold, node.view)):
                yield node._replace(bound_s=max(node.bound_s, bound), mbs_index=mbs_index)
            return
        zeros = {zero for results in own for zero in results.target.zero_stages}
        limit_s = max(results.limit_s for results in own)
        if node.passes_s < 0:
            # The attention of documents is planned only where its lower bound may win.
            for model in dict.fromkeys((self.cost_model.lower_bounds, self.cost_model)):
                passes_s, bound = self._step_bound_s(model, node.fold, sizes[node.mbs_index], zeros, limit_s)
                if bound >= limit_s:
                    return
            refined = node._replace(bound_s=max(node.bound_s, bound), passes_s=passes_s)
        else:
            bound = node.passes_s + self._least_recompute_s(node.fold, *sizes[node.mbs_index], zeros) + STEP_OVERHEAD_S
            refined = node._replace(bound_s=max(node.bound_s, bound), has_memory=True)
        if bound < limit_s:
            yield refined

    def _price_node(self, node: "_Node", own: Sequence["_TargetResults"], *, is_beam: bool = True) -> None:
        """Add the best mappings of a fold and a micro-batch size that fit to targets."""
        limits: dict[tuple[int, ...], float] = {}
        for results in own:
            stages = results.target.zero_stages
            limits[stages] = max(limits.get(stages, -inf), results.limit_s)
        found = self._fastest_that_fit(node.fold, *node.view.pipelines_by_mbs[node.mbs_index], limits, is_beam=is_beam)
        for results in own:
            timed = found.get(results.target.zero_stages)
            if timed is not None:
                results.add(node.fold, timed)

    @memoised(all_arguments)
    def _passes_on_rank(self, view: AttentionView) -> list[tuple[int, float]]:
        """Return each micro-batch size with a lower bound of a pipeline rank's time, in passes through the whole model.

        A bubble is (pp - 1) / vpp forward passes of a rank or longer, a third of both passes.
        """
        found = []
        for mbs, pipelines in view.pipelines_by_mbs:
            n = self._global_batch_size // (mbs * view.dp)
            most = max(pipeline.vpp for pipeline in pipelines)
            found.append((mbs, (n + (view.pp - 1) / (3 * most) if view.pp > 1 else n) / view.pp))
        return found

    def _fold_bounds_s(self, folds: Sequence[tuple[Fold, AttentionView]]) -> list[float]:
        """Return a lower bound of a step's seconds with the degrees of each fold."""
        # Kernels of the largest micro-batches are the most efficient.
        largest = [view.pipelines_by_mbs[-1][0] for _, view in folds]
        self._add_layer_bounds((fold, size) for (fold, _), size in zip(folds, largest, strict=True))
        return [
            min(passes * size for size, passes in self._passes_on_rank(view)) * (self._layers_s(fold, most) / most)
            for (fold, view), most in zip(folds, largest, strict=True)
        ]

    def _size_bounds_s(self, fold: Fold, view: AttentionView) -> list[float]:
        """Return a lower bound of a step's seconds with the degrees of a fold and each micro-batch size."""
        self._add_layer_bounds((fold, size) for size, _ in view.pipelines_by_mbs)
        return [passes * self._layers_s(fold, size) for size, passes in self._passes_on_rank(view)]

    def _layers_key(self, fold: Fold, mbs: int) -> tuple[int, ...]:
        peers = () if self.cost_model.workload.attention is None else (fold.dp,)
        return (fold.tp, fold.cp, mbs, fold.ep, fold.etp, *peers)

    def _add_layer_bounds(self, wanted: Iterable[tuple[Fold, int]]) -> None:
        """Add lower bounds of the seconds of all layers and the head for one micro-batch, over the dispatchers.

        Overlap only hides communication.
        """
        known = self._layer_bounds
        new = {key: degrees for degrees in wanted if (key := self._layers_key(*degrees)) not in known}
        choices = {
            key: [MicroBatchChoice(fold, mbs, dispatcher, True) for dispatcher in self._dispatchers(fold, mbs)]
            for key, (fold, mbs) in new.items()
        }
        seconds = iter(self._models_s(list(chain.from_iterable(choices.values()))))
        for key, own in choices.items():
            found = [(next(seconds), choice.dispatcher) for choice in own]
            known[key] = min(found, key=lambda bound: bound[0], default=(inf, None))

    def _models_s(self, choices: Sequence[MicroBatchChoice]) -> list[float]:
        """Return the seconds of all layers, the head and the loss for one micro-batch of each choice."""
        if not choices:
            return []
        model = self.cost_model.lower_bounds
        is_coupled = model.workload.is_coupled
        has_documents = model.workload.attention is not None
        of_mixer = self._layers_key if has_documents else lambda fold, mbs: (fold.tp, fold.cp, mbs)
        mixers, mixer_of = _distinct(choices, lambda c: of_mixer(c.fold, c.mbs))
        networks, network_of = _distinct(
            choices,
            lambda c: (c.fold.tp, c.mbs / c.fold.cp, c.fold.cp * is_coupled, c.fold.ep, c.fold.etp, c.dispatcher),
        )
        found: Seconds = np.array([sum(model.head_and_loss_s(m)) for m in mixers])[mixer_of]
        for kind, number in enumerate(model.kind_counts):
            mixer = stack_blocks([model.layer_costs.mixer(kind, m, model.attention_peers(m)) for m in mixers], mixer_of)
            network = stack_blocks([model.layer_costs.feed_forward(kind, m) for m in networks], network_of)
            found += number * sum(model.plain_s((mixer, network), overlap=True))
        seconds: list[float] = found.tolist()
        return seconds

    def _step_bound_s(
        self,
        model: CostModel,
        fold: Fold,
        sizes: tuple[int, tuple[PipelineVariant, ...]],
        zeros: Collection[int],
        limit_s: float,
    ) -> tuple[float, float]:
        """Return lower bounds of the seconds of the micro-batches of a step, and of a step with some ZeRO stages.

        Args:
            sizes: the micro-batch size, and its pipelines.
            limit_s: the bound of a step that takes longer.
        """
        size, pipelines = sizes
        plain = self._plain_pipelines(fold, pipelines)
        fastest = self._layer_bounds[self._layers_key(fold, size)][1] or self._dispatchers(fold, size)[0]
        choice = MicroBatchChoice(fold, size, fastest, False, plain)
        # Overlap only hides communication.
        passes = model.pass_times(choice._replace(overlap=True).mapping(), plain)
        least_s = limit_s
        stages = {zero for zero, _ in self.memory.placements if zero in zeros}
        # ZeRO-2 only reduces more often than ZeRO-1.
        least_stages = stages - {2} if 1 in stages else stages
        placements = [placement for placement in self.memory.placements if placement[0] in least_stages]
        # Slower passes hide more communication, but never more than they take longer.
        for place in np.argsort(passes.seconds[:, 0], kind="stable").tolist():
            if passes.seconds[place, 0] + STEP_OVERHEAD_S >= least_s:
                break
            for zero, moments in placements:
                m = choice.mapping(plain[place], zero, moments)
                least_s = min(least_s, float(model.step_s(passes, m, place)[0]))
        return float(passes.seconds.min()), least_s

    def _layers_s(self, fold: Fold, mbs: int) -> float:
        """Return the seconds of `_add_layer_bounds`. Without a legal dispatcher they are inf."""
        return self._layer_bounds[self._layers_key(fold, mbs)][0]

    def _least_recompute_s(
        self, fold: Fold, size: int, pipelines: tuple[PipelineVariant, ...], zeros: Collection[int]
    ) -> float:
        """Return the least seconds of recomputation in a step with some ZeRO stages that may fit, or inf."""
        # Overlap needs no less memory than none.
        choices = list(self._choices(fold, size, pipelines, False)) or list(self._choices(fold, size, pipelines, True))
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

    def _plain_pipelines(self, fold: Fold, pipelines: tuple[PipelineVariant, ...]) -> tuple[PipelineVariant, ...]:
        """Return the pipelines to price: without pipeline parallelism all schedules take equally long."""
        return tuple(p for p in pipelines if fold.pp == 1 and p.schedule == DEFAULT_SCHEDULE) or pipelines

    def _choices(
        self, fold: Fold, size: int, pipelines: tuple[PipelineVariant, ...], overlap: bool
    ) -> Iterator[MicroBatchChoice]:
        """Yield the dispatchers to look at, fastest first, and the pipelines that are legal with them."""
        plain = self._plain_pipelines(fold, pipelines)
        fastest = inf
        choices = [MicroBatchChoice(fold, size, dispatcher, overlap) for dispatcher in self._dispatchers(fold, size)]
        times = (float(self.cost_model.model_s(choice.mapping())) for choice in choices)
        for seconds, choice in sorted(zip(times, choices, strict=True), key=itemgetter(0)):
            legal = self.space.legal_pipelines(fold, size, plain, choice.dispatcher, overlap)
            if not legal:
                continue
            # Most dispatchers save the same tensors, so the fastest of them is enough.
            has_own = has_own_memory(choice.dispatcher)
            if seconds < fastest or has_own and self.memory_model.activation_memory.may_need_less(choice.mapping()):
                yield choice._replace(pipelines=legal)
                fastest = fastest if has_own else seconds

    @memoised(lambda self, fold, mbs: (fold.ep, fold.etp, fold.tp * fold.cp, mbs))
    def _dispatchers(self, fold: Fold, mbs: int) -> tuple[DispatcherPart, ...]:
        """Return the legal dispatchers, without dispatchers that are priced like a legal default dispatcher."""
        found = self.space.dispatchers(fold, mbs)
        if fold.ep * fold.etp == 1 or self.cost_model.model_spec.config.routed is None:
            return found[:1]
        default = default_part(DispatcherPart)
        has_default = default in found
        return tuple(
            part
            for part in reversed(found)
            if part == default or not has_default or overrides_any(part, "traffic", "sends_once")
        )

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
        may_fit = self.memory.may_fit(choice)
        dispatch = choice.dispatcher, choice.overlap
        for i, pipeline in enumerate(choice.pipelines):
            zeros = self.space.legal_zero_stages(choice.fold, choice.mbs, pipeline.schedule, *dispatch)
            for number, (zero, moments) in enumerate(self.memory.placements):
                limit_s = max((limit for stages, limit in limits.items() if zero in stages), default=-inf)
                may_win = may_fit[i, number] & (passes.seconds[i] + STEP_OVERHEAD_S < limit_s)
                if zero in zeros and may_win.any():
                    m = choice.mapping(pipeline, zero, moments)
                    yield m, np.where(may_win, self.cost_model.step_s(passes, m, i), inf)

    def smallest_plan(self) -> PlannedMapping:
        """Return the mapping of least memory. The space has one."""
        return self.price(self.memory.smallest[1])


def _distinct(
    choices: Sequence[MicroBatchChoice], key: Callable[[MicroBatchChoice], Hashable]
) -> tuple[list[ParallelMapping], list[int]]:
    """Return the mappings of choices with distinct keys, and the index of each choice's."""
    known: dict[Hashable, tuple[int, MicroBatchChoice]] = {}
    places = [known.setdefault(key(choice), (len(known), choice))[0] for choice in choices]
    return [choice.mapping() for _, choice in known.values()], places
