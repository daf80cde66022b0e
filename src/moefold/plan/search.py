"""The fastest mappings that fit into memory, exactly, without pricing the others. Torch-free.

A fold stands for many thousand mappings: micro-batch sizes x dispatchers x overlap x schedules with virtual stages x
zero x homes of the moments x parts to make again or to offload. What is left out is left out because it cannot win:

* The layers of one micro-batch with nothing made again, over the pipeline ranks, take less than any mapping with the
  same fold, micro-batch size, dispatcher and overlap: bubbles, sends, sums and the optimizer are positive.
* The times of all pipelines of such a base, nothing made again, are below those of all mappings with that pipeline,
  and so are their sends and bubbles by themselves.
* With a saver the layers take longer, and what data parallelism and the optimizer add is least for the states that are
  sharded least. Only what fits counts: the states of each kind of sharding and home of the moments, with the
  activations of each saver in two moments of the step.
* The times of all pipelines of a base with many savers are made at once, exactly but for data parallelism and the
  optimizer (`saver_time.py`), and then exactly for each kind of sharding that fits in those two moments.
* What is left is asked, fastest first, whether it fits in all moments of the step: the first that does is the best.

Candidates are taken in ascending order of these bounds, over all folds, always that one further which may be the
fastest of all (`fold_search.py`). So the best few folds come out in their order, and of the others only what may be
faster than the last of these has been looked into.

`tests/plan/test_search.py` compares with pricing every mapping.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import islice, product
from math import inf
from typing import cast

from moefold.plan.fold_search import FoldSearch
from moefold.plan.mapping import Mapping
from moefold.plan.memory import MEMORY_PARTS, Memory, MemoryEstimate
from moefold.plan.pipeline_choice import Base, FoldPrices, PipelineChoice, Timed, mapping_of
from moefold.plan.saver_time import SaverTimes
from moefold.plan.space import AttentionView, Fold, MappingSpace, Pipeline
from moefold.plan.step_time import Pricer, StepTime


@dataclass(frozen=True, slots=True)
class Plan:
    """A mapping with its price."""

    mapping: Mapping
    time: StepTime
    memory: MemoryEstimate

    @property
    def memory_parts(self) -> dict[str, float]:
        """Bytes of the fullest rank, by part."""
        return {part: getattr(self.memory, part) for part in MEMORY_PARTS}

    @property
    def order(self) -> tuple[bool, float, float]:
        """Sorts plans best first: what fits, then what is fast, then what needs little."""
        return not self.memory.fits, self.time.total_s, self.memory.total

    @property
    def binding(self) -> str:
        """What the step is bound by: the part that takes longest, and memory where it asked for a price in time."""
        pays = "memory" if self.mapping.recompute or self.mapping.zero > 1 else ""
        return " + ".join(filter(None, (self.time.binding.replace("_", " "), pays)))


@dataclass(frozen=True, slots=True)
class _LayerSums:
    """All layers and the head for one micro-batch, nothing made again."""

    forward_s: float
    backward_s: float
    kinds: tuple[float, ...]
    """One layer of each kind, forward and backward."""

    def is_no_faster_than(self, other: "_LayerSums") -> bool:
        """Whether no part of it takes less time."""
        mine = (self.forward_s, self.backward_s, *self.kinds)
        return all(a >= b for a, b in zip(mine, (other.forward_s, other.backward_s, *other.kinds), strict=True))


class Search:
    """Finds the best mapping of each fold of a space.

    Args:
        space: the legal mappings.
        pricer: their times.
        memory: their memory.
    """

    def __init__(self, space: MappingSpace, pricer: Pricer, memory: Memory) -> None:
        self.space, self.pricer, self.memory = space, pricer, memory
        self.prices = FoldPrices(space, SaverTimes(pricer), memory)
        self._batch = pricer.workload.global_batch_size
        self._layers: dict[tuple[object, ...], _LayerSums] = {}
        self._least_layers: dict[tuple[int, ...], float] = {}
        self._overlapped: dict[tuple[object, ...], tuple[Pipeline, ...]] = {}
        self._counts = [pricer.shape.layers.count(kind) for kind in range(len(pricer.shape.kinds))]
        self._known_bases: dict[Fold, tuple[Base, ...]] = {}
        self._found: dict[Fold, Timed | None] = {}
        self._has_experts = any(k.feed_forward and k.feed_forward.kind == "moe" for k in pricer.shape.kinds)

    def ranked(self) -> list[Plan]:
        """The best mapping of every fold, best first; those that do not fit stand behind the others."""
        return sorted((self.best(fold, view) for fold, view in self.space.folds), key=lambda plan: plan.order)

    def first(self, count: int) -> list[Plan]:
        """The first so many of `ranked`, or fewer if fewer fit."""
        best = islice(self._ascending(), count)
        return sorted((self.price(mapping) for _, mapping in best), key=lambda plan: plan.order)

    def num_faster(self, seconds: float) -> int:
        """Folds whose best mapping that fits takes less."""
        near = {view for view in self.space.views if self._view_floor(view) < seconds}
        return sum(
            self._search_of(fold, view).finish(seconds, is_enough=True) is not None
            for fold, view in self.space.folds
            if view in near and self._fold_floor(fold, view) < seconds
        )

    def best(self, fold: Fold, view: AttentionView) -> Plan:
        """The fastest mapping of a fold that fits, or, if none does, one that needs little memory."""
        if fold not in self._found:
            self._found[fold] = self._search_of(fold, view).finish()
        best = self._found[fold]
        return self.price(best[1]) if best is not None else self._leanest(fold, view)

    def price(self, mapping: Mapping) -> Plan:
        """The price of any mapping."""
        return Plan(mapping, self.pricer.step_time(mapping), self.memory.estimate(mapping))

    def can_fit(self, fold: Fold, view: AttentionView) -> bool:
        """Whether any mapping of a fold fits."""
        return self._leanest(fold, view).memory.fits

    def _search_of(self, fold: Fold, view: AttentionView) -> FoldSearch:
        return FoldSearch(self.prices, fold, self._bases_of(fold, view))

    def _ascending(self) -> Iterator[Timed]:
        """The fastest mappings of the folds that have one, fastest first.

        The folds come by the least time of attention, with experts at the speed of large products; then they are
        looked into, always that one further which may be the fastest.
        """
        floors = {view: self._view_floor(view) for view in self.space.views}
        searches: dict[int, FoldSearch] = {}
        queue = [(floors[view], i, False) for i, (_, view) in enumerate(self.space.folds)]
        heapify(queue)
        while queue and queue[0][0] < inf:
            floor, i, is_known = heappop(queue)
            fold, view = self.space.folds[i]
            if not is_known:
                heappush(queue, (max(floor, self._fold_floor(fold, view)), i, True))
                continue
            if i not in searches:
                searches[i] = self._search_of(fold, view)
            elif searches[i].best and searches[i].is_through:
                yield cast(Timed, searches.pop(i).best)
                continue
            else:
                searches[i].advance()
            heappush(queue, (max(floor, searches[i].least_s), i, True))

    def _view_floor(self, view: AttentionView) -> float:
        """Seconds of a step at least, whatever the degrees of the experts."""
        pricer, least = self.pricer, inf
        for size, _ in view.batches:
            seconds = sum(pricer.ends(view.tp, view.cp, size))
            for kind, count in enumerate(self._counts):
                seconds += count * pricer.least_layer_s(kind, view.tp, view.cp, size)
            least = min(least, self._batch // (size * view.dp) * seconds / view.pp)
        return least

    def _fold_floor(self, fold: Fold, view: AttentionView) -> float:
        """Seconds of a step at least, with the experts as they are cut."""
        return (
            min(self._batch // (size * fold.dp) * self._least_layers_s(fold, size) for size, _ in view.batches)
            / fold.pp
        )

    def _least_layers_s(self, fold: Fold, size: int) -> float:
        """Seconds of all layers and the head for one micro-batch, with the fastest dispatcher."""
        key = (fold.tp, fold.cp, size, fold.ep, fold.etp)
        if key not in self._least_layers:
            ways = product(self._dispatchers(fold, size), (False, True))
            every = [self._layer_sums(fold, size, dispatcher, overlap) for dispatcher, overlap in ways]
            self._least_layers[key] = min((layers.forward_s + layers.backward_s for layers in every), default=inf)
        return self._least_layers[key]

    def _bases_of(self, fold: Fold, view: AttentionView) -> tuple[Base, ...]:
        if fold not in self._known_bases:
            self._known_bases[fold] = tuple(self._bases(fold, view))
        return self._known_bases[fold]

    def _bases(self, fold: Fold, view: AttentionView) -> Iterator[Base]:
        """Every micro-batch size and dispatcher, plain and overlapped, with the pipelines that go with them."""
        for size, pipelines in view.batches:
            n = self._batch // (size * fold.dp)
            # Without a pipeline all schedules take as long.
            plain = tuple(p for p in pipelines if fold.pp == 1 and p.schedule == "1f1b")
            for overlap in (False, True):
                fastest: list[_LayerSums] = []
                for dispatcher in self._dispatchers(fold, size):
                    legal = self._legal(fold, size, plain or pipelines, dispatcher, overlap)
                    layers = self._layer_sums(fold, size, dispatcher, overlap) if legal else None
                    if layers is None:
                        continue
                    base = Base(n * (layers.forward_s + layers.backward_s) / fold.pp, size, dispatcher, overlap, legal)
                    # All keep the same rows, so the one whose parts are all faster stands for others; not allgather.
                    if self._is_apart(fold, base) or not any(map(layers.is_no_faster_than, fastest)):
                        fastest += [] if dispatcher == "allgather" else [layers]
                        yield base

    def _is_apart(self, fold: Fold, base: Base) -> bool:
        """Whether its dispatcher may be the one that fits: with few ranks and many copies, or a capacity below 1."""
        m = mapping_of(fold, base, base.pipelines[0])
        return base.dispatcher == "allgather" and self.memory.kept.gathers_for_less(m)

    def _legal(
        self, fold: Fold, size: int, pipelines: tuple[Pipeline, ...], dispatcher: str, overlap: bool
    ) -> tuple[Pipeline, ...]:
        """Those of some pipelines that go with a dispatcher and overlap."""
        if not overlap:
            return pipelines if self.space.zeros_of(fold, size, "", dispatcher, overlap) else ()
        key = (fold.ep, fold.etp, fold.dp, fold.pp, size, dispatcher)
        if key not in self._overlapped:
            zeros = {
                schedule: self.space.zeros_of(fold, size, schedule, dispatcher, overlap)
                for schedule in {pipeline.schedule for pipeline in pipelines}
            }
            self._overlapped[key] = tuple(pipeline for pipeline in pipelines if zeros[pipeline.schedule])
        return self._overlapped[key]

    def _dispatchers(self, fold: Fold, size: int) -> tuple[str, ...]:
        """The legal ones, without those that are priced as another one."""
        found = self.space.dispatchers(fold, size)
        if fold.ep * fold.etp == 1 or not self._has_experts:
            return found[:1]
        return tuple(name for name in reversed(found) if name != "leastloaded" or "alltoall" not in found)

    def _leanest(self, fold: Fold, view: AttentionView) -> Plan:
        """The mapping of least memory, with the smallest micro-batches and the first dispatcher that are legal."""
        for size, pipelines in view.batches:
            for dispatcher in self.space.dispatchers(fold, size):
                leanest: list[tuple[float, Mapping]] = []
                for overlap in (False, True):
                    legal = [p for p in pipelines if self.space.zeros_of(fold, size, p.schedule, dispatcher, overlap)]
                    if legal:
                        opened = self.prices.open(fold, Base(0.0, size, dispatcher, overlap, tuple(legal)))
                        leanest += [PipelineChoice(self.prices, fold, opened, i).leanest() for i in range(len(legal))]
                if leanest:
                    return self.price(min(leanest, key=lambda entry: entry[0])[1])
        raise AssertionError(f"{fold} is a fold of no legal mapping")

    def _layer_sums(self, fold: Fold, size: int, dispatcher: str, overlap: bool) -> _LayerSums:
        key = (fold.tp, fold.cp, size, fold.ep, fold.etp, dispatcher, overlap)
        if key not in self._layers:
            probe = Mapping(
                tp=fold.tp, cp=fold.cp, mbs=size, ep=fold.ep, etp=fold.etp, dispatcher=dispatcher, overlap=overlap
            )
            forward, backward = self.pricer.ends(fold.tp, fold.cp, size)
            kinds = []
            for kind, count in enumerate(self._counts):
                ahead, behind = self.pricer.plain_layer(kind, probe)
                kinds.append(ahead + behind)
                forward += count * ahead
                backward += count * behind
            self._layers[key] = _LayerSums(forward, backward, tuple(kinds))
        return self._layers[key]
