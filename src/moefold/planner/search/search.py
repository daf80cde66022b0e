"""Best-first search: the fastest mappings that fit into memory, exactly, without pricing all others. Torch-free.

A fold has many thousand mappings: micro-batch sizes x dispatchers x overlap x schedules with virtual stages x ZeRO
stages x placements of the moments x parts to recompute or offload. Lower bounds exclude most of them:

* The layers of one micro-batch without recomputation, divided by the pipeline ranks, take less than any mapping with
  the same fold, micro-batch size, dispatcher and overlap: bubbles, sends, reductions and the optimizer are positive.
* The times of all pipelines of such a choice, without recomputation, are lower bounds of all mappings with that
  pipeline, and so are their sends and bubbles alone.
* With a memory strategy the layers take longer, and data parallelism and the optimizer add least for the least sharded
  states. Only mappings that may fit count: the states of each ZeRO stage and placement of the moments, with the
  activations of each strategy at two snapshots of the step.
* The times of all pipelines of a choice under many strategies are computed at once, without data parallelism and the
  optimizer (`planner/cost_model/strategy.py`), and then exactly for each sharding that fits at those two snapshots.
* The remaining mappings are checked, fastest first, against all snapshots of the step: the first that fits is the best.

Candidates of all folds are expanded in ascending order of these bounds (`FoldSearch`), so the best folds are found in
their order, and of the other folds only candidates that may be faster than the last of these are examined.

`tests/planner/search/test_search.py` compares with pricing every mapping.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import islice, product
from math import inf
from typing import cast

from moefold.config.chosen import default_part
from moefold.config.groups.dispatcher import DispatcherPart, is_own
from moefold.planner.cost_model.step import CostModel, StepTime
from moefold.planner.cost_model.strategy import StrategyCosts
from moefold.planner.lengths.strategy import AttentionStrategy
from moefold.planner.mapping import ParallelMapping
from moefold.planner.memory.activations import has_own_memory
from moefold.planner.memory.budget import MEMORY_PARTS, MemoryEstimate, MemoryModel
from moefold.planner.search.pipeline_search import (
    FoldCosts,
    MicroBatchChoice,
    PipelineChoice,
    PricedChoice,
    StrategyBatch,
    TimedMapping,
    build_mapping,
)
from moefold.planner.search.space import AttentionView, Fold, MappingSpace, PipelineVariant
from moefold.topology.schedules import DEFAULT_SCHEDULE

_QueueEntry = tuple[float, int, int, int]
"""Lower bound in seconds; indices of the micro-batch choice, of the strategy batch and of the pipeline; -1: not chosen
yet. A size whose choices are not listed yet has -1 minus its index in place of a choice."""

SearchStep = tuple[float, ParallelMapping | None]
"""Seconds of the fastest mapping of a fold that fits, and that mapping; without a mapping a lower bound in seconds of
all that follow. Both ascend."""


class FoldSearch:
    """Best-first search in one fold: sizes expand into choices, these into strategy batches, these into pipelines.

    Args:
        fold_costs: cost and memory of the space.
        fold: the degrees.
        size_bounds_s: lower bound of a step's seconds for each micro-batch size of the fold.
        choices_of_size: returns the micro-batch choices of the size with an index.
    """

    def __init__(
        self,
        fold_costs: FoldCosts,
        fold: Fold,
        size_bounds_s: Sequence[float],
        choices_of_size: Callable[[int], tuple[MicroBatchChoice, ...]],
    ) -> None:
        self._fold_costs = fold_costs
        self._fold = fold
        self._choices_of_size = choices_of_size
        self._micro_batch_choices: list[MicroBatchChoice] = []
        self._sends_and_bubble_s: dict[int, float] = {}
        self._strategy_batches: dict[int, list[StrategyBatch]] = {}
        self._priced_choices: dict[tuple[int, int], PricedChoice] = {}
        self._pipeline_choices: dict[tuple[int, int, int], PipelineChoice] = {}
        self._queue: list[_QueueEntry] = [(bound, -1 - size, -1, -1) for size, bound in enumerate(size_bounds_s)]
        heapify(self._queue)
        self.best: TimedMapping | None = None
        """The fastest mapping so far."""

    @property
    def lower_bound_s(self) -> float:
        """Lower bound in seconds of the fastest mapping that fits; inf if none is left."""
        left = self._queue[0][0] if self._queue else inf
        return min(left, self._best_s)

    @property
    def is_finished(self) -> bool:
        """True if `best` is the fastest of all."""
        return not self._queue or self._queue[0][0] >= self._best_s

    @property
    def _best_s(self) -> float:
        return self.best[0] if self.best else inf

    def finish(self, limit: float = inf, *, stop_at_first: bool = False) -> TimedMapping | None:
        """Return the fastest mapping below a limit, or any below it if one is enough; None if there is none."""
        while not self.is_finished and self.lower_bound_s < limit and not (stop_at_first and self.best):
            self.advance(limit)
        return self.best

    def advance(self, limit: float = inf) -> None:
        """Expand the candidate with the lowest bound, if it may be below a limit."""
        bound, i, part, which = heappop(self._queue)
        limit = min(limit, self._best_s)
        if i < 0:
            for listed in self._choices_of_size(-1 - i):
                self._push(listed.lower_bound_s, bound, (len(self._micro_batch_choices), -1, -1), limit)
                self._micro_batch_choices.append(listed)
            return
        base = self._micro_batch_choices[i]
        if part < 0 and i not in self._sends_and_bubble_s:
            lower_bound, self._sends_and_bubble_s[i] = self._fold_costs.lower_bound_plain(self._fold, base)
            self._push(lower_bound, bound, (i, -1, -1), limit)
        elif part < 0:
            self._strategy_batches[i] = self._fold_costs.strategy_batches(
                self._fold, base, self._sends_and_bubble_s[i], limit
            )
            if self._strategy_batches[i]:
                self._push(self._strategy_batches[i][0].lower_bound_s, bound, (i, 0, -1), limit)
        elif which < 0:
            self._price_batch(bound, i, part, limit)
        elif (i, part, which) not in self._pipeline_choices:
            choice = PipelineChoice(self._fold_costs, self._fold, self._priced_choices[i, part], which)
            self._pipeline_choices[i, part, which] = choice
            self._push(choice.lower_bound_s(limit), bound, (i, part, which), limit)
        elif (found := self._pipeline_choices.pop((i, part, which)).fastest(limit)) is not None:
            self.best = found

    def _price_batch(self, lower_bound: float, i: int, batch: int, limit: float) -> None:
        """Price the pipelines with a batch of memory strategies, and queue the next batch."""
        portions = self._strategy_batches[i]
        priced = self._fold_costs.price_choice(self._fold, self._micro_batch_choices[i], portions[batch].below(limit))
        self._priced_choices[i, batch] = priced
        for number, least in enumerate(priced.lower_bounds_s):
            self._push(least, lower_bound, (i, batch, number), limit)
        if batch + 1 < len(portions):
            self._push(portions[batch + 1].lower_bound_s, lower_bound, (i, batch + 1, -1), limit)

    def _push(self, lower_bound_s: float, min_lower_bound: float, indices: tuple[int, int, int], limit: float) -> None:
        if lower_bound_s < limit:
            heappush(self._queue, (max(min_lower_bound, lower_bound_s), *indices))


@dataclass(frozen=True, slots=True)
class PlannedMapping:
    """A mapping with its predicted time and memory."""

    mapping: ParallelMapping
    time: StepTime
    memory: MemoryEstimate
    attention: AttentionStrategy | None = None
    """How the ranks share the attention of documents; None: as the recipe says."""

    @property
    def memory_parts(self) -> dict[str, float]:
        """Bytes of the fullest rank, by part."""
        return {part: getattr(self.memory, part) for part in MEMORY_PARTS}

    @property
    def sort_key(self) -> tuple[bool, float, float]:
        """Sort key, best first: mappings that fit, then fast ones, then those with less memory."""
        return not self.memory.fits, self.time.total_s, self.memory.total

    @property
    def bottleneck(self) -> str:
        """The part of the step that takes longest, and "memory" if saving memory costs time."""
        pays = "memory" if self.mapping.recompute or self.mapping.zero > 1 else ""
        return " + ".join(filter(None, (self.time.bottleneck.replace("_", " "), pays)))


@dataclass(frozen=True, slots=True)
class _LayerTotals:
    """Seconds of all layers and the head for one micro-batch, without recomputation."""

    forward_s: float
    backward_s: float
    kinds: tuple[float, ...]
    """Seconds of one layer of each kind, forward and backward."""

    def is_no_faster_than(self, other: "_LayerTotals") -> bool:
        """Return whether no part takes less time than in `other`."""
        mine = (self.forward_s, self.backward_s, *self.kinds)
        return all(a >= b for a, b in zip(mine, (other.forward_s, other.backward_s, *other.kinds), strict=True))


class Search:
    """Search of the best mapping of each fold of a space.

    Args:
        space: the legal mappings.
        cost_model: their times.
        memory_model: their memory.
    """

    def __init__(self, space: MappingSpace, cost_model: CostModel, memory_model: MemoryModel) -> None:
        self.space = space
        self.cost_model = cost_model
        self.memory_model = memory_model
        self.fold_costs = FoldCosts(space, StrategyCosts(cost_model), memory_model)
        self._global_batch_size = cost_model.workload.global_batch_size
        self._layer_totals_cache: dict[tuple[object, ...], _LayerTotals] = {}
        self._lower_bound_layers: dict[tuple[int, ...], float] = {}
        self._overlapped_pipelines: dict[tuple[object, ...], tuple[PipelineVariant, ...]] = {}
        self._kind_counts = [
            cost_model.model_spec.layers.count(kind) for kind in range(len(cost_model.model_spec.kinds))
        ]
        self._micro_batch_choice_cache: dict[tuple[Fold, int], tuple[MicroBatchChoice, ...]] = {}
        self._best_by_fold: dict[Fold, TimedMapping | None] = {}
        self._has_experts = cost_model.model_spec.has_experts

    def rank_all(self) -> list[PlannedMapping]:
        """Return the best mapping of every fold, best first; those that do not fit come last."""
        return sorted((self.best(fold, view) for fold, view in self.space.folds), key=lambda plan: plan.sort_key)

    def top_plans(self, count: int) -> list[PlannedMapping]:
        """Return the first `count` plans of `rank_all` that fit."""
        best = islice((mapping for _, mapping in self.steps() if mapping is not None), count)
        return sorted((self.price(mapping) for mapping in best), key=lambda plan: plan.sort_key)

    def num_faster(self, seconds: float) -> int:
        """Return the number of folds whose best mapping that fits takes less than `seconds`."""
        near_views = {view for view in self.space.views if self._view_lower_bound_s(view) < seconds}
        return sum(
            self._fold_search(fold, view).finish(seconds, stop_at_first=True) is not None
            for fold, view in self.space.folds
            if view in near_views and self._fold_lower_bound_s(fold, view) < seconds
        )

    def best(self, fold: Fold, view: AttentionView) -> PlannedMapping:
        """Return the fastest mapping of a fold that fits, or, if none does, one that needs little memory."""
        if fold not in self._best_by_fold:
            self._best_by_fold[fold] = self._fold_search(fold, view).finish()
        best = self._best_by_fold[fold]
        return self.price(best[1]) if best is not None else self._min_memory_plan(fold, view)

    def price(self, mapping: ParallelMapping) -> PlannedMapping:
        """Return any mapping with its time and memory."""
        return PlannedMapping(mapping, self.cost_model.step_time(mapping), self.memory_model.estimate(mapping))

    def can_fit(self, fold: Fold, view: AttentionView) -> bool:
        """Return whether any mapping of a fold fits."""
        return self._min_memory_plan(fold, view).memory.fits

    def _fold_search(self, fold: Fold, view: AttentionView) -> FoldSearch:
        bounds = [self._size_lower_bound_s(fold, size) for size, _ in view.pipelines_by_mbs]
        return FoldSearch(self.fold_costs, fold, bounds, lambda i: self._micro_batch_choices_of(fold, view, i))

    def steps(self) -> Iterator[SearchStep]:
        """Search one candidate at a time, always the one with the lowest bound; see `SearchStep`.

        Folds are ordered by the lower bound of attention, with experts at the speed of large GEMMs, then by a bound
        with the experts' degrees, and then expanded.
        """
        bounds = {view: self._view_lower_bound_s(view) for view in self.space.views}
        searches: dict[int, FoldSearch] = {}
        queue = [(bounds[view], i, False) for i, (_, view) in enumerate(self.space.folds)]
        heapify(queue)
        while queue and queue[0][0] < inf:
            yield queue[0][0], None
            bound, i, is_known = heappop(queue)
            fold, view = self.space.folds[i]
            if not is_known:
                heappush(queue, (max(bound, self._fold_lower_bound_s(fold, view)), i, True))
                continue
            if i not in searches:
                searches[i] = self._fold_search(fold, view)
            elif searches[i].best and searches[i].is_finished:
                yield cast(TimedMapping, searches.pop(i).best)
                continue
            else:
                searches[i].advance()
            heappush(queue, (max(bound, searches[i].lower_bound_s), i, True))

    def _view_lower_bound_s(self, view: AttentionView) -> float:
        """Return a lower bound of a step's seconds over all degrees of the experts."""
        cost_model = self.cost_model
        lower_bound = inf
        for size, _ in view.pipelines_by_mbs:
            probe = ParallelMapping(tp=view.tp, cp=view.cp, dp=view.dp, mbs=size)
            seconds = sum(cost_model.head_and_loss_s(view.tp, view.cp, size))
            for kind, count in enumerate(self._kind_counts):
                seconds += count * cost_model.lower_bound_layer_s(kind, probe)
            lower_bound = min(lower_bound, self._global_batch_size // (size * view.dp) * seconds / view.pp)
        return lower_bound

    def _fold_lower_bound_s(self, fold: Fold, view: AttentionView) -> float:
        """Return a lower bound of a step's seconds with the experts' degrees of a fold."""
        return min(self._size_lower_bound_s(fold, size) for size, _ in view.pipelines_by_mbs)

    def _size_lower_bound_s(self, fold: Fold, mbs: int) -> float:
        """Return a lower bound of a step's seconds with the degrees of a fold and a micro-batch size."""
        return self._global_batch_size // (mbs * fold.dp) * self._lower_bound_layers_s(fold, mbs) / fold.pp

    def _lower_bound_layers_s(self, fold: Fold, mbs: int) -> float:
        """Return a lower bound of the seconds of all layers and the head for one micro-batch, over the dispatchers."""
        key = (fold.tp, fold.cp, mbs, fold.ep, fold.etp, *self._peers_key(fold))
        if key not in self._lower_bound_layers:
            options = product(self._dispatchers(fold, mbs), (False, True))
            bounds = self.cost_model.lower_bounds
            totals = [self._layer_totals(fold, mbs, dispatcher, overlap, bounds) for dispatcher, overlap in options]
            self._lower_bound_layers[key] = min(
                (layers.forward_s + layers.backward_s for layers in totals), default=inf
            )
        return self._lower_bound_layers[key]

    def _micro_batch_choices_of(self, fold: Fold, view: AttentionView, i: int) -> tuple[MicroBatchChoice, ...]:
        size, pipelines = view.pipelines_by_mbs[i]
        if (fold, size) not in self._micro_batch_choice_cache:
            self._micro_batch_choice_cache[fold, size] = tuple(self._micro_batch_choices(fold, size, pipelines))
        return self._micro_batch_choice_cache[fold, size]

    def _micro_batch_choices(
        self, fold: Fold, size: int, pipelines: tuple[PipelineVariant, ...]
    ) -> Iterator[MicroBatchChoice]:
        """Yield every dispatcher for a micro-batch size, with and without overlap, and the pipelines legal with it."""
        n = self._global_batch_size // (size * fold.dp)
        # Without a pipeline all schedules take equally long.
        plain = tuple(p for p in pipelines if fold.pp == 1 and p.schedule == DEFAULT_SCHEDULE)
        for overlap in (False, True):
            fastest: list[_LayerTotals] = []
            for dispatcher in self._dispatchers(fold, size):
                legal = self._legal_pipelines(fold, size, plain or pipelines, dispatcher, overlap)
                layers = self._layer_totals(fold, size, dispatcher, overlap, self.cost_model) if legal else None
                if layers is None:
                    continue
                choice = MicroBatchChoice(
                    n * (layers.forward_s + layers.backward_s) / fold.pp, size, dispatcher, overlap, legal
                )
                # Most dispatchers save the same tensors, so one whose parts are all faster is enough.
                if self._may_need_less_memory(fold, choice) or not any(map(layers.is_no_faster_than, fastest)):
                    fastest += [] if has_own_memory(dispatcher) else [layers]
                    yield choice

    def _may_need_less_memory(self, fold: Fold, choice: MicroBatchChoice) -> bool:
        """Return whether a choice's dispatcher may need less memory than others.

        Allgather does with few ranks and many routed tokens, or with a capacity factor below 1.
        """
        m = build_mapping(fold, choice, choice.pipelines[0])
        return has_own_memory(choice.dispatcher) and self.memory_model.activation_memory.may_need_less(m)

    def _legal_pipelines(
        self, fold: Fold, mbs: int, pipelines: tuple[PipelineVariant, ...], dispatcher: DispatcherPart, overlap: bool
    ) -> tuple[PipelineVariant, ...]:
        """Return the pipelines that are legal with a dispatcher and overlap."""
        if not overlap:
            return pipelines if self.space.legal_zero_stages(fold, mbs, "", dispatcher, overlap) else ()
        key = (fold.ep, fold.etp, fold.dp, fold.pp, mbs, dispatcher)
        if key not in self._overlapped_pipelines:
            zeros = {
                schedule: self.space.legal_zero_stages(fold, mbs, schedule, dispatcher, overlap)
                for schedule in {pipeline.schedule for pipeline in pipelines}
            }
            self._overlapped_pipelines[key] = tuple(pipeline for pipeline in pipelines if zeros[pipeline.schedule])
        return self._overlapped_pipelines[key]

    def _dispatchers(self, fold: Fold, mbs: int) -> tuple[DispatcherPart, ...]:
        """Return the legal dispatchers, without those that are priced like the default one, if it is legal."""
        found = self.space.dispatchers(fold, mbs)
        if fold.ep * fold.etp == 1 or not self._has_experts:
            return found[:1]
        default = default_part(DispatcherPart)
        like = default in found
        return tuple(
            part for part in reversed(found) if part == default or not like or is_own(part, "traffic", "sends_once")
        )

    def _min_memory_plan(self, fold: Fold, view: AttentionView) -> PlannedMapping:
        """Return the mapping of least memory, with the smallest legal micro-batches and the first legal dispatcher."""
        for size, pipelines in view.pipelines_by_mbs:
            for dispatcher in self.space.dispatchers(fold, size):
                smallest: list[tuple[float, ParallelMapping]] = []
                for overlap in (False, True):
                    legal = [
                        p
                        for p in pipelines
                        if self.space.legal_zero_stages(fold, size, p.schedule, dispatcher, overlap)
                    ]
                    if legal:
                        priced = self.fold_costs.price_choice(
                            fold, MicroBatchChoice(0.0, size, dispatcher, overlap, tuple(legal))
                        )
                        smallest += [
                            PipelineChoice(self.fold_costs, fold, priced, i).min_memory() for i in range(len(legal))
                        ]
                if smallest:
                    return self.price(min(smallest, key=lambda entry: entry[0])[1])
        raise AssertionError(f"{fold} is a fold of no legal mapping")

    def _peers_key(self, fold: Fold) -> tuple[int, ...]:
        """Return what the layers depend on besides tp, cp, ep and etp: dp, where the samples hold documents."""
        return () if self.cost_model.workload.attention is None else (fold.dp,)

    def _layer_totals(
        self, fold: Fold, mbs: int, dispatcher: DispatcherPart, overlap: bool, cost_model: CostModel
    ) -> _LayerTotals:
        is_bound = cost_model is not self.cost_model
        key = (fold.tp, fold.cp, mbs, fold.ep, fold.etp, dispatcher, overlap, is_bound, *self._peers_key(fold))
        if key not in self._layer_totals_cache:
            probe = ParallelMapping(
                tp=fold.tp,
                cp=fold.cp,
                dp=fold.dp,
                mbs=mbs,
                ep=fold.ep,
                etp=fold.etp,
                dispatcher=dispatcher,
                overlap=overlap,
            )
            forward, backward = cost_model.head_and_loss_s(fold.tp, fold.cp, mbs)
            kinds = []
            for kind, count in enumerate(self._kind_counts):
                forward_s, backward_s = cost_model.plain_layer_s(kind, probe)
                kinds.append(forward_s + backward_s)
                forward += count * forward_s
                backward += count * backward_s
            self._layer_totals_cache[key] = _LayerTotals(forward, backward, tuple(kinds))
        return self._layer_totals_cache[key]
