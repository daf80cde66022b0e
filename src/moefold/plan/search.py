"""The fastest mappings that fit into memory, exactly, without pricing the others. Torch-free.

A fold stands for many thousand mappings: micro-batch sizes x dispatchers x overlap x schedules with virtual stages x
zero x homes of the moments x parts to make again or to offload. What is left out is left out because it cannot win:

* The layers of one micro-batch with nothing made again, over the pipeline ranks, take less than any mapping with the
  same fold, micro-batch size, dispatcher and overlap: bubbles, sends, sums and the optimizer are positive.
* The times of all pipelines of such a base with all savers are made at once, exactly but for what data parallelism and
  the optimizer add (`saver_time.py`). The least of a pipeline is below all its mappings.
* Of a pipeline those savers count that fit beside the least that any sharding leaves of weights and moments, first in
  two moments of a step, then in all. The least of their times is below that of all its mappings that fit.
* What is left is priced exactly, time and memory, for each kind of sharding and each home of the moments.

Candidates are taken in ascending order of these bounds, so the first whose bound reaches the best time found ends the
search of a fold. Where only the best few folds are asked for, the time of the last of them ends the search of every
other fold, and a fold whose bound reaches it is not looked into at all.

`tests/plan/test_search.py` compares with pricing every mapping.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from math import inf

import numpy as np

from moefold.plan.mapping import Mapping
from moefold.plan.memory import MEMORY_PARTS, Memory, MemoryEstimate
from moefold.plan.pipeline_choice import Base, FoldPrices, Opened, PipelineChoice, Timed
from moefold.plan.saver_time import SaverTimes
from moefold.plan.space import AttentionView, Fold, MappingSpace, Pipeline
from moefold.plan.step_time import Pricer, Seconds, StepTime


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
        best: list[Timed] = []
        for fold, view in self._below(lambda: _limit(best, count)):
            found = self._fastest(fold, view, _limit(best, count))
            if found is not None:
                best.append(found)
                best.sort(key=lambda timed: timed[0])
                del best[count:]
        return sorted((self.price(mapping) for _, mapping in best), key=lambda plan: plan.order)

    def num_faster(self, seconds: float) -> int:
        """Folds whose best mapping that fits takes less."""
        return sum(
            self._fastest(fold, view, seconds, is_enough=True) is not None
            for fold, view in self._below(lambda: seconds)
        )

    def best(self, fold: Fold, view: AttentionView) -> Plan:
        """The fastest mapping of a fold that fits, or, if none does, one that needs little memory."""
        if fold not in self._found:
            self._found[fold] = self._fastest(fold, view, inf)
        best = self._found[fold]
        return self.price(best[1]) if best is not None else self._leanest(fold, view)

    def price(self, mapping: Mapping) -> Plan:
        """The price of any mapping."""
        return Plan(mapping, self.pricer.step_time(mapping), self.memory.estimate(mapping))

    def can_fit(self, fold: Fold, view: AttentionView) -> bool:
        """Whether any mapping of a fold fits."""
        return self._leanest(fold, view).memory.fits

    def _below(self, limit: Callable[[], float]) -> Iterator[tuple[Fold, AttentionView]]:
        """The folds of which some mapping may take less than a limit, best first, as long as there are any.

        They come by the least time of attention, with experts at the speed of large products; those that are left are
        looked into once more, with the experts as they are cut.
        """
        floors: dict[AttentionView, float] = {}
        queue = []
        for i, (_, view) in enumerate(self.space.folds):
            if view not in floors:
                floors[view] = self._view_floor(view)
            queue.append((floors[view], i, False))
        heapify(queue)
        while queue and queue[0][0] < limit():
            floor, i, is_known = heappop(queue)
            fold, view = self.space.folds[i]
            if is_known:
                yield fold, view
            else:
                known = min((base.floor_s for base in self._bases_of(fold, view)), default=inf)
                heappush(queue, (max(floor, known), i, True))

    def _view_floor(self, view: AttentionView) -> float:
        """Seconds of a step at least, whatever the degrees of the experts."""
        pricer, least = self.pricer, inf
        for size, _ in view.batches:
            seconds = sum(pricer.ends(view.tp, view.cp, size))
            for kind, count in enumerate(self._counts):
                seconds += count * pricer.least_layer_s(kind, view.tp, view.cp, size)
            least = min(least, self._batch // (size * view.dp) * seconds / view.pp)
        return least

    def _fastest(self, fold: Fold, view: AttentionView, limit: float, *, is_enough: bool = False) -> Timed | None:
        """The fastest below a limit, or any below it where one is enough.

        Best first: bases unfold into pipelines, these are asked whether they fit, and what may fit is priced.
        """
        best: Timed | None = None
        bases = self._bases_of(fold, view)
        fitting: dict[int, Seconds] = {}
        opened: dict[int, Opened] = {}
        choices: dict[tuple[int, int], PipelineChoice] = {}
        queue: list[tuple[float, int, int]] = [(base.floor_s, i, -1) for i, base in enumerate(bases)]
        heapify(queue)
        while queue and queue[0][0] < limit and not (is_enough and best):
            floor, i, which = heappop(queue)
            if which < 0 and i not in fitting:
                fitting[i] = self.prices.least_fitting(fold, bases[i])
                heappush(queue, (max(floor, float(fitting[i].min())), i, -1))
            elif which < 0:
                opened[i] = self.prices.open(fold, bases[i], np.flatnonzero(fitting[i] < limit))
                for number, least in enumerate(opened[i].least):
                    if least < limit:
                        heappush(queue, (max(floor, least), i, number))
            elif (i, which) not in choices:
                choices[i, which] = choice = PipelineChoice(self.prices, fold, opened[i], which)
                heappush(queue, (max(floor, choice.least_fitting(limit)), i, which))
            elif (found := choices[i, which].fastest(limit)) is not None:
                best, limit = found, found[0]
        return best

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
                    # Beside allgather all keep the same rows, so the one whose parts are all faster stands for others.
                    if layers is not None and not any(layers.is_no_faster_than(other) for other in fastest):
                        fastest += [layers] if dispatcher != "allgather" else []
                        floor = n * (layers.forward_s + layers.backward_s) / fold.pp
                        yield Base(floor, size, dispatcher, overlap, legal)

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
        """The mapping of least memory, with the smallest micro-batches."""
        size, pipelines = view.batches[0]
        dispatcher = self.space.dispatchers(fold, size)[0]
        leanest: list[tuple[float, Mapping]] = []
        for overlap in (False, True):
            legal = [p for p in pipelines if self.space.zeros_of(fold, size, p.schedule, dispatcher, overlap)]
            if legal and self.space.savers:
                opened = self.prices.open(fold, Base(0.0, size, dispatcher, overlap, tuple(legal)))
                leanest += [PipelineChoice(self.prices, fold, opened, i).leanest() for i in range(len(legal))]
        return self.price(min(leanest, key=lambda entry: entry[0])[1])

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


def _limit(best: list[Timed], count: int) -> float:
    return best[-1][0] if len(best) == count else inf
