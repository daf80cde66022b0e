"""The fastest mappings that fit into memory, exactly, without pricing the others. Torch-free.

A fold stands for many thousand mappings: micro-batch sizes x dispatchers x overlap x schedules with virtual stages x
zero x homes of the moments x parts to make again or to offload. What is left out is left out because it cannot win:

* `floor` is below the time of every mapping with the same fold, micro-batch size, dispatcher and overlap, and with a
  pipeline below that of every zero and saver: the mean over pipeline ranks of the layers' time with nothing made again
  is at most the busiest rank's, bubbles grow with it, and all other parts of a step are positive. Candidates are taken
  in ascending order of it, so the first whose floor reaches the best time found ends the search of a fold.
* Where only the best few folds are asked for, the time of the last of them ends the search of every other fold, and
  a fold whose floor reaches it is not looked into at all.
* The times of all savers of one pipeline and zero are made at once, exactly; their memory is asked for in ascending
  order of time, and the first that fits is the best of them.

`tests/plan/test_search.py` compares with pricing every mapping.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush
from itertools import product
from math import inf

import numpy as np

from moefold.plan.mapping import Mapping
from moefold.plan.memory import MEMORY_PARTS, Memory, MemoryEstimate
from moefold.plan.pipeline_time import bubble_s
from moefold.plan.space import HOST, AttentionView, Fold, MappingSpace, Pipeline
from moefold.plan.step_time import STEP_S, Pricer, StepTime

AT_HAND = "none"
AT_ONCE = 48
"""Savers whose memory is asked for at a time."""


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
class _Base:
    """What the layers of one micro-batch take at least, all over the pipeline."""

    floor_s: float
    size: int
    dispatcher: str
    overlap: bool
    pipelines: tuple[Pipeline, ...]
    layers: "_LayerSums"


@dataclass(frozen=True, slots=True)
class _LayerSums:
    """All layers and the head for one micro-batch, nothing made again."""

    forward_s: float
    backward_s: float
    weight_s: float
    kinds: tuple[float, ...]
    """One layer of each kind, forward and backward."""
    head: float

    def is_no_faster_than(self, other: "_LayerSums") -> bool:
        """Whether no part of it takes less time."""
        mine = (self.forward_s, self.backward_s, *self.kinds)
        return all(a >= b for a, b in zip(mine, (other.forward_s, other.backward_s, *other.kinds), strict=True))


_Timed = tuple[float, Mapping]
"""Seconds of a step, and what takes them."""


class Search:
    """Finds the best mapping of each fold of a space.

    Args:
        space: the legal mappings.
        pricer: their times.
        memory: their memory.
    """

    def __init__(self, space: MappingSpace, pricer: Pricer, memory: Memory) -> None:
        self.space, self.pricer, self.memory = space, pricer, memory
        self._batch = pricer.workload.global_batch_size
        self._layers: dict[tuple[object, ...], _LayerSums] = {}
        self._contents: dict[tuple[int, int, bool], tuple[tuple[tuple[int, ...], bool], ...]] = {}
        self._counts = [pricer.shape.layers.count(kind) for kind in range(len(pricer.shape.kinds))]
        self._known_bases: dict[Fold, tuple[_Base, ...]] = {}
        self._found: dict[Fold, _Timed | None] = {}
        self._has_experts = any(k.feed_forward and k.feed_forward.kind == "moe" for k in pricer.shape.kinds)

    def ranked(self) -> list[Plan]:
        """The best mapping of every fold, best first; those that do not fit stand behind the others."""
        return sorted((self.best(fold, view) for fold, view in self.space.folds), key=lambda plan: plan.order)

    def first(self, count: int) -> list[Plan]:
        """The first so many of `ranked`, or fewer if fewer fit."""
        best: list[_Timed] = []
        for fold, view in self._below(lambda: _limit(best, count)):
            found = self._fastest(fold, view, _limit(best, count))
            if found is not None:
                best.append(found)
                best.sort(key=lambda timed: timed[0])
                del best[count:]
        return sorted((self.price(mapping) for _, mapping in best), key=lambda plan: plan.order)

    def num_faster(self, seconds: float) -> int:
        """Folds whose best mapping that fits takes less."""
        return sum(self._fastest(fold, view, seconds) is not None for fold, view in self._below(lambda: seconds))

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

    def _fastest(self, fold: Fold, view: AttentionView, limit: float) -> _Timed | None:
        """The fastest below a limit. Best first: bases unfold into pipelines, and these into stages of zero."""
        best: _Timed | None = None
        bases = self._bases_of(fold, view)
        queue: list[tuple[float, int, int, int, bool]] = [
            (base.floor_s, i, -1, -1, False) for i, base in enumerate(bases)
        ]
        heapify(queue)
        # Where the fastest of all savers fits with the moments at hand, nothing is won by moments elsewhere.
        roomy: set[tuple[int, int, int]] = set()
        while queue and queue[0][0] < limit:
            floor, i, which, zero, is_away = heappop(queue)
            base = bases[i]
            if which < 0:
                for number, pipeline in enumerate(base.pipelines):
                    heappush(queue, (max(floor, self._pipeline_floor(fold, base, pipeline)), i, number, -1, False))
            elif zero < 0:
                for stage, home in self._stages(fold, base, which):
                    least = self._floor(self._probe(fold, base, which, stage, home), base)
                    heappush(queue, (max(floor, least), i, which, stage, home == HOST))
            else:
                if is_away and (i, which, zero) in roomy:
                    continue
                found, is_first = self._best_fitting(
                    base, self._probe(fold, base, which, zero, HOST if is_away else AT_HAND), limit
                )
                if is_first:
                    roomy.add((i, which, zero))
                if found is not None:
                    best, limit = found, found[0]
        return best

    def _bases_of(self, fold: Fold, view: AttentionView) -> tuple[_Base, ...]:
        if fold not in self._known_bases:
            self._known_bases[fold] = tuple(self._bases(fold, view))
        return self._known_bases[fold]

    def _bases(self, fold: Fold, view: AttentionView) -> Iterator[_Base]:
        """Every micro-batch size and dispatcher, plain and overlapped, with the pipelines that go with them."""
        for size, pipelines in view.batches:
            n = self._batch // (size * fold.dp)
            # Without a pipeline all schedules take as long.
            plain = tuple(p for p in pipelines if fold.pp == 1 and p.schedule == "1f1b")
            schedules = dict.fromkeys(pipeline.schedule for pipeline in plain or pipelines)
            for overlap in (False, True):
                fastest: list[_LayerSums] = []
                for dispatcher in self._dispatchers(fold, size):
                    ok = {s for s in schedules if self.space.zeros_of(fold, size, s, dispatcher, overlap)}
                    legal = tuple(p for p in plain or pipelines if p.schedule in ok)
                    layers = self._layer_sums(fold, size, dispatcher, overlap) if legal else None
                    # Beside allgather all keep the same rows, so the one whose parts are all faster stands for others.
                    if layers is not None and not any(layers.is_no_faster_than(other) for other in fastest):
                        fastest += [layers] if dispatcher != "allgather" else []
                        floor = n * (layers.forward_s + layers.backward_s) / fold.pp
                        yield _Base(floor, size, dispatcher, overlap, legal, layers)

    def _dispatchers(self, fold: Fold, size: int) -> tuple[str, ...]:
        """The legal ones, without those that are priced as another one."""
        found = self.space.dispatchers(fold, size)
        if fold.ep * fold.etp == 1 or not self._has_experts:
            return found[:1]
        return tuple(name for name in reversed(found) if name != "leastloaded" or "alltoall" not in found)

    def _stages(self, fold: Fold, base: _Base, which: int) -> Iterator[tuple[int, str]]:
        """What is sharded, and where the moments live."""
        schedule = base.pipelines[which].schedule
        zeros = self.space.zeros_of(fold, base.size, schedule, base.dispatcher, base.overlap)
        for zero in zeros:
            for moments in self.space.moment_homes:
                yield zero, moments

    def _pipeline_floor(self, fold: Fold, base: _Base, pipeline: Pipeline) -> float:
        """Seconds of a step at least: the busiest rank, and idle stages."""
        kinds, head = base.layers.kinds, base.layers.head
        slowest = max(
            sum(count * seconds for count, seconds in zip(counts, kinds, strict=True)) + has_loss * head
            for counts, has_loss in self._contents_of(fold.pp, pipeline)
        )
        rounds = self._batch / (base.size * fold.dp)
        return rounds * slowest + self._bubble(fold.pp, base.layers, pipeline)

    def _floor(self, probe: Mapping, base: _Base) -> float:
        """Seconds of a step at least, as if all stages were even and all of it fitted."""
        layers, pp = base.layers, probe.pp
        n = probe.num_micro_batches(self._batch)
        gathers, gradients, optimizer = self.pricer.replicas(probe)
        ahead, behind = layers.forward_s / pp, layers.backward_s / pp
        shown = float(self.pricer.shown_replicas_s(probe, (gathers, gradients), ahead, behind, n))
        bubble = self._bubble(pp, layers, Pipeline(probe.schedule, probe.vpp))
        return n * (ahead + behind) + shown + bubble + optimizer + STEP_S

    def _bubble(self, pp: int, layers: _LayerSums, pipeline: Pipeline) -> float:
        mean = (layers.forward_s / pp, layers.backward_s / pp, layers.weight_s / pp)
        return float(bubble_s(*mean, pp=pp, vpp=pipeline.vpp, schedule=pipeline.schedule))

    def _contents_of(self, pp: int, pipeline: Pipeline) -> tuple[tuple[tuple[int, ...], bool], ...]:
        """Layers of each kind and whether there is a loss, of ranks that differ."""
        key = (pp, pipeline.vpp, pipeline.schedule in V_SHAPED)
        if key not in self._contents:
            ranks = self.pricer.contents_of_ranks(pp, pipeline.vpp, pipeline.schedule)
            self._contents[key] = tuple({(counts, has_loss): None for counts, _, has_loss in ranks})
        return self._contents[key]

    def _best_fitting(self, base: _Base, probe: Mapping, limit: float) -> tuple[_Timed | None, bool]:
        """The fastest below a limit that fits with one pipeline and stage of zero; and whether no other is faster."""
        savers = self.space.savers_with(base.overlap)
        seconds = self.pricer.step_times(probe, savers)
        below = np.flatnonzero(seconds < limit)
        if not below.size or not self.memory.states_fit(probe):
            return None, not below.size
        order = below[np.argsort(seconds[below], kind="stable")]
        room = self.memory.room(probe)
        for first in range(0, len(order), AT_ONCE):
            some = order[first : first + AT_ONCE]
            fitting = np.flatnonzero(room.fitting(some, savers))
            if fitting.size:
                i = int(some[fitting[0]])
                recompute, offload = savers[i]
                mapping = replace(probe, recompute=recompute, offload=(*offload, *probe.offload))
                return (float(seconds[i]), mapping), first == 0 and fitting[0] == 0
        return None, False

    def _leanest(self, fold: Fold, view: AttentionView) -> Plan:
        """The mapping of least memory, with the smallest micro-batches."""
        size, pipelines = view.batches[0]
        dispatcher = self.space.dispatchers(fold, size)[0]
        leanest: list[tuple[float, Mapping]] = []
        for pipeline, overlap in product(pipelines, (False, True)):
            zeros = self.space.zeros_of(fold, size, pipeline.schedule, dispatcher, overlap)
            savers = self.space.savers_with(overlap)
            if zeros and savers:
                home = self.space.moment_homes[-1]
                probe = mapping_of(fold, size, pipeline, dispatcher, zeros[-1], overlap, home)
                totals = self.memory.room(probe).totals(np.arange(len(savers)), savers)
                recompute, offload = savers[int(np.argmin(totals))]
                mapping = replace(probe, recompute=recompute, offload=(*offload, *probe.offload))
                leanest.append((float(totals.min()), mapping))
        return self.price(min(leanest, key=lambda entry: entry[0])[1])

    def _probe(self, fold: Fold, base: _Base, which: int, zero: int, moments: str) -> Mapping:
        """The mapping with nothing made again."""
        pipeline = base.pipelines[which]
        return mapping_of(fold, base.size, pipeline, base.dispatcher, zero, base.overlap, moments)

    def _layer_sums(self, fold: Fold, size: int, dispatcher: str, overlap: bool) -> _LayerSums:
        key = (fold.tp, fold.cp, size, fold.ep, fold.etp, dispatcher, overlap)
        if key not in self._layers:
            probe = Mapping(
                tp=fold.tp, cp=fold.cp, mbs=size, ep=fold.ep, etp=fold.etp, dispatcher=dispatcher, overlap=overlap
            )
            head = self.pricer.ends(fold.tp, fold.cp, size)
            forward, backward = head
            weight = 0.0
            kinds = []
            for kind, count in enumerate(self._counts):
                layer = self.pricer.layer(kind, probe)
                kinds.append(layer.forward_s + layer.backward_s)
                forward += count * layer.forward_s
                backward += count * layer.backward_s
                weight += count * layer.weight_s
            self._layers[key] = _LayerSums(forward, backward, weight, tuple(kinds), sum(head))
        return self._layers[key]


def _limit(best: list[_Timed], count: int) -> float:
    return best[-1][0] if len(best) == count else inf


V_SHAPED = ("zbv", "dualpipev")


def mapping_of(
    fold: Fold, size: int, pipeline: Pipeline, dispatcher: str, zero: int, overlap: bool, moments: str
) -> Mapping:
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
        mbs=size,
        zero=zero,
        offload=("optimizer",) if moments == HOST else (),
        dispatcher=dispatcher,
        overlap=overlap,
        schedule=pipeline.schedule,
    )
