"""Search of the fastest mappings that fit: a beam over folds and micro-batch sizes. Torch-free.

A queue holds attention views, and pairs of a fold and a micro-batch size, by a lower bound of their seconds, and
refines the lowest one: the layers of one micro-batch without recomputation and the least bubble, first with experts at
the speed of large GEMMs, then with their degrees, then with the memory strategies that may fit at three snapshots of
the step. Sends, reductions and the optimizer only add to them. A pair whose turn it is again is priced: all pipelines
(schedules with virtual stages), ZeRO stages and memory strategies together (`planner/cost_model/strategy.py`), and its
best is checked against the memory of all snapshots of its step.

The search is a beam for each number of pipeline ranks: it looks at `MAX_VIEWS` views and at the memory of `BEAM` pairs.
Mappings with few of them have the lowest bounds, and in large models they do not fit. `Search.gap` is how much faster a
mapping outside the beam could be at most, by its lower bound; 0 if the beam contains all that may win. What is listed,
`space.py` decides.
`tests/planner/search/test_search.py` compares with pricing every mapping.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from heapq import heapify, heappop, heappush
from itertools import product
from math import inf
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from moefold.config.chosen import default_part
from moefold.config.groups.context import ContextPart
from moefold.config.groups.dispatcher import DispatcherPart, is_own
from moefold.planner.cost_model.step import STEP_OVERHEAD_S, CostModel, Seconds, StepTime
from moefold.planner.cost_model.strategy import PassTimes, StrategyCosts
from moefold.planner.mapping import OFFLOADED_OPTIMIZER, ParallelMapping
from moefold.planner.memory.activations import has_own_memory
from moefold.planner.memory.budget import MEMORY_PARTS, MemoryBudget, MemoryEstimate, MemoryModel
from moefold.planner.search.constraints import Fold
from moefold.planner.search.space import HOST, AttentionView, MappingSpace, PipelineVariant
from moefold.topology.schedules import DEFAULT_SCHEDULE, schedule_named

BEAM = 300
MAX_VIEWS = 48
"""Most pairs of a fold and a micro-batch size whose memory a round of the search looks at, and most attention views,
for each number of pipeline ranks."""
MAX_ROUNDS = 4
"""Rounds of the search, each over what the one before left out, for groups without a mapping."""
MAX_PIPELINES = 8
"""Pipelines that are priced of a fold with a micro-batch size and a dispatcher: the fastest without recomputation, and
1F1B, which holds least."""
FIT_BATCH = 64
"""Memory strategies that are checked against all snapshots at a time."""

PLAIN_PIPELINE = PipelineVariant(DEFAULT_SCHEDULE, 1)

ByteArray = NDArray[np.float64]
TimedMapping = tuple[float, ParallelMapping]
"""Seconds of a step, and its mapping."""


@dataclass(frozen=True, slots=True)
class PlannedMapping:
    """A mapping with its predicted time and memory."""

    mapping: ParallelMapping
    time: StepTime
    memory: MemoryEstimate
    attention: ContextPart | None = None
    """How the ranks share the attention of documents; None: as the recipe says."""

    @property
    def fold(self) -> Fold:
        """The degrees."""
        return fold_of(self.mapping)

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


def fold_of(m: ParallelMapping) -> Fold:
    """Return the degrees of a mapping."""
    return Fold(m.tp, m.cp, m.dp, m.pp, m.ep, m.etp, m.edp)


def _any_fold(fold: Fold) -> bool:
    return True


@dataclass(frozen=True)
class MappingGroup:
    """Mappings of which a search finds the best, one for each fold."""

    count: int = 1
    """Folds to find."""
    accepts: Callable[[Fold], bool] = _any_fold
    zero_stages: tuple[int, ...] = (0, 1, 2, 3)


@dataclass(frozen=True, slots=True)
class MicroBatchChoice:
    """A micro-batch size, a dispatcher and overlap in a fold, with the pipelines that are legal with them."""

    mbs: int
    dispatcher: DispatcherPart
    overlap: bool
    pipelines: tuple[PipelineVariant, ...]


@dataclass(slots=True)
class _Best:
    """The fastest mapping so far with some ZeRO stages, and the seconds that it has to beat."""

    zero_stages: tuple[int, ...]
    limit_s: float
    found: TimedMapping | None = None

    def take(self, seconds: float, mapping: ParallelMapping) -> None:
        """Replace the mapping by a faster one."""
        self.limit_s = seconds
        self.found = seconds, mapping


class _Node(NamedTuple):
    """An entry of the queue: an attention view, or a fold with a micro-batch size."""

    bound_s: float
    order: int
    view: AttentionView
    fold: Fold | None = None
    number: int = -1
    """Index of the micro-batch size in the view; -1: none is chosen yet."""
    is_bounded: bool = False
    """True if the bound takes memory into account."""


class _Found:
    """The best mappings of a group so far, one for each fold."""

    def __init__(self, group: MappingGroup) -> None:
        self.group = group
        self.best: dict[Fold, TimedMapping] = {}
        self._accepted: dict[Fold, bool] = {}

    @property
    def limit_s(self) -> float:
        """Seconds that another fold has to beat."""
        seconds = sorted(seconds for seconds, _ in self.best.values())
        return seconds[self.group.count - 1] if len(seconds) >= self.group.count else inf

    def accepts(self, fold: Fold) -> bool:
        """Return whether a fold is of the group."""
        if fold not in self._accepted:
            self._accepted[fold] = self.group.accepts(fold)
        return self._accepted[fold]

    def add(self, fold: Fold, best: _Best) -> None:
        """Add the best mapping of a fold, if it is faster than what is known of it."""
        if best.found is not None and best.found[0] < self.best.get(fold, (inf,))[0]:
            self.best[fold] = best.found

    def mappings(self) -> list[ParallelMapping]:
        """Return the best mappings, best first."""
        return [m for _, m in sorted(self.best.values(), key=lambda timed: timed[0])[: self.group.count]]


class Search:
    """Search of the best mappings of a space.

    Args:
        space: the legal mappings.
        cost_model: their times.
        memory_model: their memory.
    """

    def __init__(self, space: MappingSpace, cost_model: CostModel, memory_model: MemoryModel) -> None:
        self.space = space
        self.cost_model = cost_model
        self.memory_model = memory_model
        self.strategy_costs = StrategyCosts(cost_model)
        self.gap = 0.0
        """Fraction of a step by which a mapping outside the beam of the last search could be faster, at most."""
        self._global_batch_size = cost_model.workload.global_batch_size
        kinds = range(len(cost_model.model_spec.kinds))
        self._kind_counts = [cost_model.model_spec.layers.count(kind) for kind in kinds]
        self._has_experts = cost_model.model_spec.has_experts
        self._layer_bounds: dict[tuple[object, ...], float] = {}
        self._overlapped_pipelines: dict[tuple[object, ...], tuple[PipelineVariant, ...]] = {}
        self._persistent: dict[tuple[object, ...], ByteArray] = {}
        self._min_counts: dict[tuple[object, ...], tuple[ByteArray, ByteArray]] = {}
        self._best_by_fold: dict[Fold, TimedMapping | None] = {}

    def rank_all(self) -> list[PlannedMapping]:
        """Return the best mapping of every fold, best first; those that do not fit come last."""
        return sorted((self.best(fold, view) for fold, view in self.space.folds), key=lambda plan: plan.sort_key)

    def top_plans(self, count: int) -> list[PlannedMapping]:
        """Return the first `count` plans of `rank_all` that fit."""
        return self.find([MappingGroup(count)])[0]

    def find(self, groups: Sequence[MappingGroup]) -> list[list[PlannedMapping]]:
        """Return the best mappings of each group that fit, best first, each of another fold."""
        found = [_Found(group) for group in groups]
        queue = self._queue()
        skipped: list[_Node] = []
        for _ in range(MAX_ROUNDS):
            self._search_round(queue, [one for one in found if not one.best], skipped)
            if all(one.best for one in found) or not skipped:
                break
            queue = sorted(skipped)
            skipped = []
        limit_s = min((one.limit_s for one in found), default=inf)
        bound = min((node.bound_s for node in skipped), default=inf)
        self.gap = max(0.0, 1 - bound / limit_s) if limit_s < inf else 0.0
        return [sorted(map(self.price, one.mappings()), key=lambda plan: plan.sort_key) for one in found]

    def _search_round(self, queue: list["_Node"], found: Sequence["_Found"], skipped: list["_Node"]) -> None:
        """Search the queue for the best mappings of groups; what the beam leaves out is appended to `skipped`."""
        rooms: dict[int, dict[str, int]] = {}
        while queue and (bound := queue[0][0]) < max(one.limit_s for one in found):
            node = heappop(queue)
            own = [one for one in found if bound < one.limit_s and (node.fold is None or one.accepts(node.fold))]
            if not own:
                continue
            if node.is_bounded:
                self._price_node(node, own)
                continue
            if node.fold is None or node.number >= 0:
                room = rooms.setdefault(node.view.pp, {"views": MAX_VIEWS, "sizes": BEAM})
                level = "views" if node.fold is None else "sizes"
                room[level] -= 1
                if room[level] < 0:
                    skipped.append(node)
                    continue
            for refined in self._refine(node, own):
                heappush(queue, refined)

    def faster_folds(self, seconds: float) -> set[Fold]:
        """Return the folds whose best mapping that fits takes less than `seconds`."""
        found = set()
        for view, folds in self._folds_of_view.items():
            for fold in folds if self._view_bound_s(view) < seconds else ():
                best = _Best((0, 1, 2, 3), seconds)
                self._search_fold(fold, view, (best,), stops_at_first=True)
                if best.found is not None:
                    found.add(fold)
        return found

    def plans_below(
        self, limit_s: float, zero_stages: tuple[int, ...], accepts: Callable[[Fold], bool]
    ) -> list[PlannedMapping]:
        """Return the best mapping of each accepted fold that takes less than `limit_s` and fits."""
        found = []
        for fold, view in self.space.folds:
            if accepts(fold) and self._fold_bound_s(fold, view) < limit_s:
                best = _Best(zero_stages, limit_s)
                self._search_fold(fold, view, (best,), exact=False)
                found += [self.price(best.found[1])] if best.found is not None else []
        return [plan for plan in found if plan.memory.fits]

    def best(self, fold: Fold, view: AttentionView) -> PlannedMapping:
        """Return the fastest mapping of a fold that fits, or, if none does, one that needs little memory."""
        if fold not in self._best_by_fold:
            best = _Best((0, 1, 2, 3), inf)
            self._search_fold(fold, view, (best,))
            self._best_by_fold[fold] = best.found
        found = self._best_by_fold[fold]
        return self.price(found[1]) if found is not None else self._min_memory_plan(fold, view)

    def price(self, mapping: ParallelMapping) -> PlannedMapping:
        """Return any mapping with its time and memory."""
        return PlannedMapping(mapping, self.cost_model.step_time(mapping), self.memory_model.estimate(mapping))

    def can_fit(self, fold: Fold, view: AttentionView) -> bool:
        """Return whether any mapping of a fold fits."""
        return self._min_memory_plan(fold, view).memory.fits

    @cached_property
    def _folds_of_view(self) -> dict[AttentionView, list[Fold]]:
        found: dict[AttentionView, list[Fold]] = {}
        for fold, view in self.space.folds:
            found.setdefault(view, []).append(fold)
        return found

    def _queue(self) -> list["_Node"]:
        """Return the queue of a search: every attention view."""
        queue = [_Node(self._view_bound_s(view), i, view) for i, view in enumerate(self._folds_of_view)]
        heapify(queue)
        return queue

    def _refine(self, node: "_Node", own: Sequence["_Found"]) -> Iterator["_Node"]:
        """Yield the nodes with closer bounds that take the place of one, below the limits of some groups."""
        limit_s = max(one.limit_s for one in own)
        sizes = node.view.pipelines_by_mbs
        if node.fold is None:
            for fold in self._folds_of_view[node.view]:
                if any(one.accepts(fold) for one in own):
                    bound = max(node.bound_s, self._fold_bound_s(fold, node.view))
                    yield _Node(bound, node.order, node.view, fold)
            return
        if node.number < 0:
            if not self._may_hold_states(node.fold, *sizes[0], own):
                return
            for number, (size, pipelines) in enumerate(sizes):
                bound = max(node.bound_s, self._size_bound_s(node.fold, size, pipelines))
                yield node._replace(bound_s=bound, number=number)
            return
        by_zero = self._fitting_bounds_s(node.fold, *sizes[node.number])
        bound = min((by_zero.get(zero, inf) for one in own for zero in one.group.zero_stages), default=inf)
        if bound < limit_s:
            yield node._replace(bound_s=max(node.bound_s, bound), is_bounded=True)

    def _may_hold_states(
        self, fold: Fold, size: int, pipelines: tuple[PipelineVariant, ...], own: Sequence["_Found"]
    ) -> bool:
        """Return whether the states alone of some ZeRO stage of the groups fit, with the smallest micro-batches."""
        choice = MicroBatchChoice(size, self._dispatchers(fold, size)[0], False, self._plain_pipelines(fold, pipelines))
        free = self._free_bytes(fold, choice, build_mapping(fold, choice, choice.pipelines[0])).min(axis=1)
        zeros = {zero for one in own for zero in one.group.zero_stages}
        return any(least > 0 and zero in zeros for least, (zero, _) in zip(free, self.placements, strict=True))

    def _price_node(self, node: "_Node", own: Sequence["_Found"]) -> None:
        """Add the best mappings of a fold and a micro-batch size that fit to groups.

        They are found by three snapshots of the step. One that does not fit at another snapshot must not set a limit,
        which would exclude slower ones that fit: then every snapshot is looked at.
        """
        assert node.fold is not None
        limits: dict[tuple[int, ...], float] = {}
        for one in own:
            stages = one.group.zero_stages
            limits[stages] = max(limits.get(stages, -inf), one.limit_s)
        bests = {stages: _Best(stages, limit_s) for stages, limit_s in limits.items()}
        self._price_choices(node, tuple(bests.values()), exact=False)
        for stages, best in bests.items():
            if best.found is not None and not self.memory_model.estimate(best.found[1]).fits:
                bests[stages] = _Best(stages, limits[stages])
                self._price_choices(node, (bests[stages],), exact=True)
        for one in own:
            one.add(node.fold, bests[one.group.zero_stages])

    def _price_choices(self, node: "_Node", bests: Sequence[_Best], *, exact: bool) -> None:
        """Improve the best mappings by the mappings of a fold and a micro-batch size; `exact` as in `_price`."""
        assert node.fold is not None
        size, pipelines = node.view.pipelines_by_mbs[node.number]
        for choice in self._choices(node.fold, size, pipelines):
            self._price(node.fold, choice, bests, exact=exact)

    def _view_bound_s(self, view: AttentionView) -> float:
        """Return a lower bound of a step's seconds over all degrees of the experts."""
        cost_model = self.cost_model
        bound = inf
        for size, pipelines in view.pipelines_by_mbs:
            probe = ParallelMapping(tp=view.tp, cp=view.cp, dp=view.dp, mbs=size)
            seconds = sum(cost_model.head_and_loss_s(view.tp, view.cp, size))
            for kind, count in enumerate(self._kind_counts):
                seconds += count * cost_model.lower_bound_layer_s(kind, probe)
            bound = min(bound, self._passes_on_rank(view, size, pipelines) * seconds)
        return bound

    def _passes_on_rank(self, degrees: AttentionView | Fold, mbs: int, pipelines: tuple[PipelineVariant, ...]) -> float:
        """Return the passes through the whole model in whose time a pipeline rank is done, at least.

        A bubble is (pp - 1) / vpp forward passes of a rank or longer, a third of both passes.
        """
        pp = degrees.pp
        n = self._global_batch_size // (mbs * degrees.dp)
        return (n + (pp - 1) / (3 * max(p.vpp for p in pipelines)) if pp > 1 else n) / pp

    def _fold_bound_s(self, fold: Fold, view: AttentionView) -> float:
        """Return a lower bound of a step's seconds with the degrees of a fold."""
        # Kernels of the largest micro-batches are the most efficient.
        largest = view.pipelines_by_mbs[-1][0]
        least_s = self._layers_bound_s(fold, largest) / largest
        return min(self._passes_on_rank(fold, *sizes) * sizes[0] * least_s for sizes in view.pipelines_by_mbs)

    def _size_bound_s(self, fold: Fold, mbs: int, pipelines: tuple[PipelineVariant, ...]) -> float:
        """Return a lower bound of a step's seconds with the degrees of a fold and a micro-batch size."""
        return self._passes_on_rank(fold, mbs, pipelines) * self._layers_bound_s(fold, mbs)

    def _layers_bound_s(self, fold: Fold, mbs: int) -> float:
        """Return a lower bound of the seconds of all layers and the head for one micro-batch, over the dispatchers."""
        peers = () if self.cost_model.workload.attention is None else (fold.dp,)
        key = (fold.tp, fold.cp, mbs, fold.ep, fold.etp, *peers)
        if key not in self._layer_bounds:
            # Overlap only hides communication.
            totals = (
                self._layers_s(fold, mbs, dispatcher, True, self.cost_model.lower_bounds)
                for dispatcher in self._dispatchers(fold, mbs)
            )
            self._layer_bounds[key] = min(totals, default=inf)
        return self._layer_bounds[key]

    def _layers_s(
        self, fold: Fold, mbs: int, dispatcher: DispatcherPart, overlap: bool, cost_model: CostModel
    ) -> float:
        """Return the seconds of all layers and the head for one micro-batch, without recomputation."""
        m = ParallelMapping(
            **{axis: getattr(fold, axis) for axis in ("tp", "cp", "dp", "ep", "etp")},
            mbs=mbs,
            dispatcher=dispatcher,
            overlap=overlap,
        )
        layers = (
            count * sum(cost_model.plain_layer_s(kind, m)) for kind, count in enumerate(self._kind_counts) if count
        )
        return sum(layers) + sum(cost_model.head_and_loss_s(fold.tp, fold.cp, mbs))

    def _fitting_bounds_s(self, fold: Fold, size: int, pipelines: tuple[PipelineVariant, ...]) -> dict[int, float]:
        """Return a lower bound of a step's seconds for each ZeRO stage, with the strategies that may fit."""
        costs = self.strategy_costs
        plain = self._plain_pipelines(fold, pipelines)
        dispatchers = self._dispatchers(fold, size)
        fastest = min(dispatchers, key=lambda one: self._layers_s(fold, size, one, True, self.cost_model.lower_bounds))
        choice = MicroBatchChoice(size, fastest, False, plain)
        probe = build_mapping(fold, choice, plain[0])
        fits = [self._may_fit_any(fold, choice, probe)]
        for one in dispatchers:
            other = replace(probe, dispatcher=one)
            if one != fastest and has_own_memory(one) and self.memory_model.activation_memory.may_need_less(other):
                fits.append(self._may_fit_any(fold, choice, other))
        may_fit = np.any(fits, axis=0)
        if not may_fit.any():
            return {}
        least_s = float(costs.plain_pass_times(replace(probe, overlap=True), plain).seconds.min())
        # Recomputation takes the same time with all dispatchers, or less with the fastest.
        seconds = costs.lower_bound_passes(probe, self.space.strategies)
        extra = np.where(may_fit, seconds - seconds.min(), inf).min(axis=1)
        bounds = least_s + extra + STEP_OVERHEAD_S
        found: dict[int, float] = {}
        for (zero, _), bound in zip(self.placements, bounds.tolist(), strict=True):
            found[zero] = min(bound, found.get(zero, inf))
        return found

    def _may_fit_any(self, fold: Fold, choice: MicroBatchChoice, probe: ParallelMapping) -> NDArray[np.bool_]:
        """Return whether a mapping may fit under some pipeline, [placements, strategies]."""
        _, activations = self._least_counts(fold, choice)
        saved = self.memory_model.activation_memory.total_bytes(probe, self.space.strategies)
        free = self._free_bytes(fold, choice, probe)
        found: NDArray[np.bool_] = np.all((activations @ saved.T)[None] <= free[:, :, None], axis=1)
        return found

    def _free_bytes(self, fold: Fold, choice: MicroBatchChoice, probe: ParallelMapping) -> ByteArray:
        """Return the bytes that states and workspace leave for activations at most, [placements, snapshots]."""
        memory = self.memory_model
        states, _ = self._least_counts(fold, choice)
        # One byte of tolerance, so that rounding excludes nothing that fits.
        room = memory.device.memory_bytes + 1 - memory.workspace(probe)
        found: ByteArray = room - self.persistent_bytes(fold, choice) @ states.T
        return found

    def _least_counts(self, fold: Fold, choice: MicroBatchChoice) -> tuple[ByteArray, ByteArray]:
        """Return the least counts of states and activations over the pipelines of a choice, [snapshots, columns]."""
        key = (fold.pp, fold.dp * choice.mbs, choice.pipelines)
        if key not in self._min_counts:
            # No schedule holds less than 1F1B, or than one whose last stage lies on the first rank.
            small = [p for p in choice.pipelines if p.schedule == DEFAULT_SCHEDULE or _is_v_shaped(p)]
            peaks = [
                self.memory_model.peak_candidates(build_mapping(fold, choice, p)) for p in small or choice.pipelines
            ]
            states = np.array([peak.states for peak in peaks]).min(axis=0)
            self._min_counts[key] = states, np.array([peak.activations for peak in peaks]).min(axis=0)
        return self._min_counts[key]

    def _plain_pipelines(self, fold: Fold, pipelines: tuple[PipelineVariant, ...]) -> tuple[PipelineVariant, ...]:
        """Return the pipelines to price: without pipeline parallelism all schedules take equally long."""
        return tuple(p for p in pipelines if fold.pp == 1 and p.schedule == DEFAULT_SCHEDULE) or pipelines

    def _search_fold(
        self,
        fold: Fold,
        view: AttentionView,
        bests: Sequence[_Best],
        *,
        stops_at_first: bool = False,
        exact: bool = True,
    ) -> None:
        """Improve the best mappings of some ZeRO stages by the mappings of a fold; `exact` as in `_price`."""
        bounds = sorted((self._size_bound_s(fold, *sizes), i) for i, sizes in enumerate(view.pipelines_by_mbs))
        for bound, i in bounds:
            is_enough = stops_at_first and bests[0].found is not None
            if bound < max(best.limit_s for best in bests) and not is_enough:
                for choice in self._choices(fold, *view.pipelines_by_mbs[i]):
                    self._price(fold, choice, bests, exact=exact)

    def _choices(self, fold: Fold, size: int, pipelines: tuple[PipelineVariant, ...]) -> Iterator[MicroBatchChoice]:
        """Yield every dispatcher for a micro-batch size, with and without overlap, and the pipelines legal with it."""
        plain = self._plain_pipelines(fold, pipelines)
        dispatchers = self._dispatchers(fold, size)
        for overlap in (False, True):
            fastest = inf
            times = {one: self._layers_s(fold, size, one, overlap, self.cost_model) for one in dispatchers}
            for dispatcher, seconds in sorted(times.items(), key=lambda one: one[1]):
                legal = self._legal_pipelines(fold, size, plain, dispatcher, overlap)
                if not legal:
                    continue
                choice = MicroBatchChoice(size, dispatcher, overlap, legal)
                # Most dispatchers save the same tensors, so of these the fastest is enough.
                if has_own_memory(dispatcher):
                    m = build_mapping(fold, choice, legal[0])
                    if seconds < fastest or self.memory_model.activation_memory.may_need_less(m):
                        yield choice
                elif seconds < fastest:
                    fastest = seconds
                    yield choice

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

    def _price(self, fold: Fold, choice: MicroBatchChoice, bests: Sequence[_Best], *, exact: bool) -> None:
        """Improve the best mappings by the mappings of a choice: all pipelines and memory strategies at once.

        Args:
            fold: the degrees.
            choice: the rest, apart from pipeline, ZeRO stage and memory strategy.
            bests: what to improve.
            exact: whether the memory of every snapshot is checked, or of three.
        """
        limit_s = max(best.limit_s for best in bests) - STEP_OVERHEAD_S
        plain = self.strategy_costs.plain_pass_times(build_mapping(fold, choice, choice.pipelines[0]), choice.pipelines)
        fastest = np.argsort(plain.seconds[:, 0], kind="stable").tolist()
        places = [i for i in fastest if plain.seconds[i, 0] < limit_s]
        if not exact:
            places = [i for k, i in enumerate(places) if k < MAX_PIPELINES or choice.pipelines[i] == PLAIN_PIPELINE]
        kept = tuple(choice.pipelines[i] for i in sorted(places))
        if not kept:
            return
        priced = _PricedChoice(self, fold, replace(choice, pipelines=kept))
        n = self._global_batch_size // (choice.mbs * fold.dp)
        ranked: list[tuple[float, int, int, ParallelMapping, NDArray[np.intp], Seconds]] = []
        for i, pipeline in enumerate(kept):
            passes = priced.passes.of_pipeline(i)
            for number, (zero, moments) in enumerate(priced.placements):
                limit_s = max((best.limit_s for best in bests if zero in best.zero_stages), default=-inf)
                may_win = np.flatnonzero(priced.may_fit[i, number] & (passes.seconds + STEP_OVERHEAD_S < limit_s))
                if not may_win.size or zero not in priced.zero_stages(pipeline):
                    continue
                m = build_mapping(fold, choice, pipeline, zero, moments)
                seconds = self.strategy_costs.add_data_parallel_s(passes.select(may_win), m, n)
                # Stable: equal strategies keep their order.
                order = np.argsort(seconds, kind="stable")
                ranked.append((float(seconds[order[0]]), len(ranked), i, m, may_win[order], seconds[order]))
        for seconds_s, _, i, m, indices, seconds in sorted(ranked, key=lambda one: one[:2]):
            limit_s = max((best.limit_s for best in bests if m.zero in best.zero_stages), default=-inf)
            if seconds_s < limit_s:
                below = indices[: int(np.searchsorted(seconds, limit_s))]
                at = priced.first_that_fits(i, m, below) if exact else 0
                for best in bests if at is not None else ():
                    if m.zero in best.zero_stages and seconds[at] < best.limit_s:
                        best.take(float(seconds[at]), priced.with_strategy(m, int(indices[at])))

    def persistent_bytes(self, fold: Fold, choice: MicroBatchChoice) -> ByteArray:
        """Return the bytes of each state column for each ZeRO stage and placement of the moments."""
        accumulates = self._global_batch_size // (choice.mbs * fold.dp) > 1
        key = (fold, accumulates)
        if key not in self._persistent:
            mappings = [build_mapping(fold, choice, choice.pipelines[0], *placement) for placement in self.placements]
            self._persistent[key] = np.array([self.memory_model.persistent_bytes(m) for m in mappings])
        return self._persistent[key]

    @cached_property
    def placements(self) -> tuple[tuple[int, str], ...]:
        """All pairs of a ZeRO stage and a placement of the moments."""
        return tuple(product(self.space.zero_stages, self.space.optimizer_placements))

    def _min_memory_plan(self, fold: Fold, view: AttentionView) -> PlannedMapping:
        """Return the mapping of least memory, with the smallest legal micro-batches and the first legal dispatcher."""
        for size, pipelines in view.pipelines_by_mbs:
            for dispatcher in self.space.dispatchers(fold, size):
                smallest: list[tuple[float, ParallelMapping]] = []
                for overlap in (False, True):
                    legal = self._legal_pipelines(fold, size, pipelines, dispatcher, overlap)
                    if legal:
                        priced = _PricedChoice(self, fold, MicroBatchChoice(size, dispatcher, overlap, legal))
                        smallest += map(priced.min_memory, range(len(legal)))
                if smallest:
                    return self.price(min(smallest, key=lambda entry: entry[0])[1])
        raise AssertionError(f"{fold} is a fold of no legal mapping")


class _PricedChoice:
    """Times and memory of a choice under all memory strategies.

    Args:
        search: the search.
        fold: the degrees.
        choice: micro-batch size, dispatcher and overlap, and the pipelines to price.
    """

    def __init__(self, search: Search, fold: Fold, choice: MicroBatchChoice) -> None:
        self._search = search
        self._fold = fold
        self._choice = choice
        self._strategies = search.space.strategies
        self._budgets: dict[int, MemoryBudget] = {}
        self.placements = search.placements
        self._probe = build_mapping(fold, choice, choice.pipelines[0])
        memory = search.memory_model
        self._saved = memory.activation_memory.total_bytes(self._probe, self._strategies)

    @cached_property
    def passes(self) -> PassTimes:
        """Seconds of the micro-batches, [pipelines, strategies]."""
        return self._search.strategy_costs.pass_times(self._probe, self._choice.pipelines, self._strategies)

    @cached_property
    def may_fit(self) -> NDArray[np.bool_]:
        """True where a mapping fits at three snapshots of the step, [pipelines, placements, strategies]."""
        memory = self._search.memory_model
        peaks = [memory.peak_candidates(self._mapping(i)) for i in range(len(self._choice.pipelines))]
        activations = np.array([peak.activations for peak in peaks]) @ self._saved.T
        persistent = self._search.persistent_bytes(self._fold, self._choice)
        states = np.array([peak.states for peak in peaks]) @ persistent.T + memory.workspace(self._probe)
        totals = (states[:, :, :, None] + activations[:, :, None, :]).max(axis=1)
        found: NDArray[np.bool_] = totals <= memory.device.memory_bytes
        return found

    def zero_stages(self, pipeline: PipelineVariant) -> tuple[int, ...]:
        """Return the ZeRO stages that are legal with a pipeline."""
        c = self._choice
        return self._search.space.legal_zero_stages(self._fold, c.mbs, pipeline.schedule, c.dispatcher, c.overlap)

    def first_that_fits(self, number: int, mapping: ParallelMapping, indices: NDArray[np.intp]) -> int | None:
        """Return the position of the first of some strategies that fits with a pipeline; None if there is none."""
        budget = self._budget(number)
        for start in range(0, len(indices), FIT_BATCH):
            which = indices[start : start + FIT_BATCH]
            totals = budget.totals(mapping, budget.activations(which))
            fits = np.flatnonzero(totals <= self._search.memory_model.device.memory_bytes)
            if fits.size:
                return start + int(fits[0])
        return None

    def min_memory(self, number: int) -> TimedMapping:
        """Return the smallest memory of a pipeline with full sharding and offloaded moments, and its mapping."""
        pipeline = self._choice.pipelines[number]
        zero = self.zero_stages(pipeline)[-1]
        m = build_mapping(self._fold, self._choice, pipeline, zero, self.placements[-1][1])
        budget = self._budget(number)
        totals = budget.totals(m, budget.activations())
        return float(totals.min()), self.with_strategy(m, int(np.argmin(totals)))

    def with_strategy(self, mapping: ParallelMapping, index: int) -> ParallelMapping:
        """Return a mapping with the memory strategy of an index."""
        recompute, offload = self._strategies[index]
        return replace(mapping, recompute=recompute, offload=(*offload, *mapping.offload))

    def _mapping(self, number: int) -> ParallelMapping:
        return build_mapping(self._fold, self._choice, self._choice.pipelines[number])

    def _budget(self, number: int) -> MemoryBudget:
        """Return the memory of a pipeline, computed on demand: finding its snapshots is slow."""
        if number not in self._budgets:
            memory = self._search.memory_model
            self._budgets[number] = memory.memory_budget(
                self._mapping(number), self._saved, self._strategies.recomputes_comm
            )
        return self._budgets[number]


def _is_v_shaped(pipeline: PipelineVariant) -> bool:
    return schedule_named(pipeline.schedule).placement == "v"


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
