"""The fastest mapping of every fold that fits into memory, exactly, without pricing the others. Torch-free.

A fold stands for thousands of mappings: micro-batch sizes x schedules with virtual stages x dispatchers x zero x sets
of parts to make again. What is left out is left out because it cannot win:

* `floor` is below the time of every mapping with the same fold, micro-batch size and dispatcher, and with a pipeline
  below that of every zero and recomputation: the mean over pipeline ranks of the layers' time without recomputation is
  at most the busiest rank's, bubbles grow with it, and all other parts of a step are positive. Candidates are taken in
  ascending order of it, so the first whose floor reaches the best time found ends the search of a fold.
* zero=1 moves the bytes of zero=0 in other calls and holds less, so zero=0 is tried only if it is asked for. From 1 to
  3 the time grows, so the first that fits with nothing made again is the best of them.
* What is made again adds seconds to the backward pass, so sets are tried in ascending order of these, and the first
  that fits is the best with its zero.
* A micro-batch size with a pipeline that does not fit under any zero with the leanest set of parts is left out; a fold
  of which all are left out is reported with its mapping of least memory.

`tests/plan/test_search.py` compares with pricing every mapping.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush
from math import inf

from moefold.config.schema import RECOMPUTE_PARTS
from moefold.plan.fit import Fit
from moefold.plan.mapping import Mapping
from moefold.plan.memory import MemoryEstimate
from moefold.plan.pipeline_time import bubble_s
from moefold.plan.space import AttentionView, Fold, MappingSpace, Pipeline
from moefold.plan.step_time import PARTS, STEP_S, Pricer, StepTime

OF_LITTLE_USE = 0
"""zero=0, see above."""

MEMORY_PARTS = ("weights", "gradients", "optimizer", "activations", "dispatch", "logits", "workspace")

Parts = tuple[str, ...]


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
    pipelines: tuple[Pipeline, ...]
    layers: "_LayerSums"


@dataclass(frozen=True, slots=True)
class _LayerSums:
    """All layers and the head for one micro-batch, nothing made again."""

    forward_s: float
    backward_s: float
    weight_s: float
    hideable_s: float
    """Of both: waiting for launches that ends where enough is made again."""
    kinds: tuple[float, ...]
    """One layer of each kind, forward and backward."""
    head: float


_Timed = tuple[float, Mapping]
"""Seconds of a step, and what takes them."""


class Search:
    """Finds the best mapping of each fold of a space.

    Args:
        space: the legal mappings.
        pricer: their times.
        memory: their memory.
    """

    def __init__(self, space: MappingSpace, pricer: Pricer, memory: Fit) -> None:
        self.space, self.pricer, self.memory = space, pricer, memory
        self._batch = pricer.workload.global_batch_size
        zeros = [zero for zero in space.zeros if zero != OF_LITTLE_USE]
        self._zeros = zeros or list(space.zeros)
        self._layers: dict[tuple[object, ...], _LayerSums] = {}
        self._sets: dict[tuple[object, ...], list[tuple[float, Parts]]] = {}
        self._contents: dict[tuple[int, int], tuple[tuple[tuple[int, ...], bool], ...]] = {}
        # Where all layers are alike, more seconds made again mean a longer step.
        self._is_uniform = len(pricer.shape.kinds) == 1
        self._counts = [pricer.shape.layers.count(kind) for kind in range(len(pricer.shape.kinds))]

    def ranked(self) -> list[Plan]:
        """The best mapping of every fold, best first; those that do not fit stand behind the others."""
        return sorted((self.best(fold, view) for fold, view in self.space.folds), key=lambda plan: plan.order)

    def best(self, fold: Fold, view: AttentionView) -> Plan:
        """The fastest mapping of a fold that fits, or, if none does, one that needs little memory."""
        best = self._fastest(fold, view)
        return self.price(best[1]) if best is not None else self._leanest(fold, view)

    def _fastest(self, fold: Fold, view: AttentionView) -> _Timed | None:
        """Best first: micro-batch sizes and dispatchers unfold into pipelines, and these into stages of zero."""
        best: _Timed | None = None
        bases = list(self._bases(fold, view))
        queue = [(base.floor_s, i, -1, -1) for i, base in enumerate(bases)]
        heapify(queue)
        while queue and (best is None or queue[0][0] < best[0]):
            floor, i, which, zero = heappop(queue)
            if which < 0:
                for number, pipeline in enumerate(bases[i].pipelines):
                    heappush(queue, (max(floor, self._pipeline_floor(fold, bases[i], pipeline)), i, number, -1))
            elif zero < 0:
                for stage in self._zeros_of(fold):
                    heappush(queue, (max(floor, self._zero_floor(fold, bases[i], which, stage)), i, which, stage))
            else:
                best = self._best_fitting(fold, bases[i], which, zero, best)
        return best

    def price(self, mapping: Mapping) -> Plan:
        """The price of any mapping."""
        return Plan(mapping, self.pricer.step_time(mapping), self.memory.estimate(mapping))

    def _bases(self, fold: Fold, view: AttentionView) -> Iterator[_Base]:
        """Every micro-batch size and dispatcher, with the pipelines under which some zero and recomputation fits."""
        for size, pipelines in view.batches:
            n = self._batch // (size * fold.dp)
            # Without a pipeline all schedules take as long.
            plain = tuple(p for p in pipelines if fold.pp == 1 and p.schedule == "1f1b")
            fitting = tuple(p for p in plain or pipelines if self._may_fit(fold, size, p))
            if not fitting:
                continue
            seen = set()
            for dispatcher in self.space.dispatchers(fold, size):
                layers = self._layer_sums(fold, size, dispatcher)
                if layers not in seen:
                    seen.add(layers)
                    floor = n * (layers.forward_s + layers.backward_s) / fold.pp
                    yield _Base(floor, size, dispatcher, fitting, layers)

    def _pipeline_floor(self, fold: Fold, base: _Base, pipeline: Pipeline) -> float:
        """Seconds of a step at least: the busiest rank, and idle stages."""
        kinds, head = base.layers.kinds, base.layers.head
        slowest = max(
            sum(count * seconds for count, seconds in zip(counts, kinds, strict=True)) + has_loss * head
            for counts, has_loss in self._contents_of(fold.pp, pipeline.vpp)
        )
        return self._rounds(fold, base) * fold.pp * slowest + self._bubble(fold, base, pipeline, 0.0)

    def _zero_floor(self, fold: Fold, base: _Base, which: int, zero: int) -> float:
        """Seconds of a step at least, with what must be made again to fit, and what data parallelism shows at least."""
        probe = self._probe(fold, base, which, zero)
        fitting = self.memory.fitting(probe, zero)
        least = next((again for again, parts in self._recomputes(fold, base) if fitting(parts)), None)
        return inf if least is None else self._floor(fold, base, which, zero, least)

    def _floor(self, fold: Fold, base: _Base, which: int, zero: int, again: float) -> float:
        """As if all stages were even.

        Args:
            fold: the degrees.
            base: micro-batch size and dispatcher.
            which: index of the pipeline.
            zero: what is sharded.
            again: seconds that are made again, of all layers of a micro-batch.
        """
        layers, probe = base.layers, self._probe(fold, base, which, zero)
        behind = layers.backward_s + max(0.0, again - layers.hideable_s)
        n = probe.num_micro_batches(self._batch)
        gathers, gradients, optimizer = self.pricer.replicas(probe)
        ahead, behind = layers.forward_s / fold.pp, behind / fold.pp
        shown = self.pricer._exposed_replicas(probe, (gathers, gradients), ahead, behind, n)
        bubble = self._bubble(fold, base, base.pipelines[which], again)
        return n * (ahead + behind) + shown + bubble + optimizer + STEP_S

    def _bubble(self, fold: Fold, base: _Base, pipeline: Pipeline, again: float) -> float:
        layers, pp = base.layers, fold.pp
        behind = layers.backward_s + max(0.0, again - layers.hideable_s)
        mean = (layers.forward_s / pp, behind / pp, layers.weight_s / pp)
        return bubble_s(*mean, pp=pp, vpp=pipeline.vpp, schedule=pipeline.schedule)

    def _zeros_of(self, fold: Fold) -> list[int]:
        return self._zeros[:1] if fold.dp * fold.cp == fold.edp == 1 else self._zeros

    def _rounds(self, fold: Fold, base: _Base) -> float:
        return self._batch / (base.size * fold.dp * fold.pp)

    def _contents_of(self, pp: int, vpp: int) -> tuple[tuple[tuple[int, ...], bool], ...]:
        """Layers of each kind and whether there is a loss, of ranks that differ."""
        if (pp, vpp) not in self._contents:
            ranks = self.pricer._rank_contents(pp, vpp)
            self._contents[pp, vpp] = tuple({(counts, has_loss): None for counts, _, has_loss in ranks})
        return self._contents[pp, vpp]

    def _best_fitting(self, fold: Fold, base: _Base, which: int, zero: int, best: _Timed | None) -> _Timed | None:
        """The better of `best` and the fastest that fits with one pipeline and stage of zero."""
        probe = self._probe(fold, base, which, zero)
        fitting = self.memory.fitting(probe, zero)
        for again, recompute in self._recomputes(fold, base):
            if not fitting(recompute):
                continue
            if best is not None and self._floor(fold, base, which, zero, again) >= best[0]:
                break
            mapping = replace(probe, recompute=recompute)
            seconds = self.pricer.step_time(mapping).total_s
            if best is None or seconds < best[0]:
                best = (seconds, mapping)
            if self._is_uniform or not recompute:
                break
        return best

    def can_fit(self, fold: Fold, view: AttentionView) -> bool:
        """Whether any mapping of a fold fits."""
        size, pipelines = view.batches[0]
        return any(self._may_fit(fold, size, pipeline) for pipeline in pipelines)

    def _may_fit(self, fold: Fold, size: int, pipeline: Pipeline) -> bool:
        probe = mapping_of(fold, size, pipeline, "", 0, ())
        return any(self.memory.may_fit(probe, zero) for zero in self._zeros_of(fold))

    def _leanest(self, fold: Fold, view: AttentionView) -> Plan:
        """The mapping of least memory, with the smallest micro-batches."""
        size, pipelines = view.batches[0]
        dispatcher = self.space.dispatchers(fold, size)[0]
        zeros = self._zeros_of(fold)
        probes = [mapping_of(fold, size, p, dispatcher, zero, ()) for p in pipelines for zero in zeros]
        found = [(*self.memory.least(probe, probe.zero), i) for i, probe in enumerate(probes)]
        _, parts, i = min(found, key=lambda entry: entry[0])
        return self.price(replace(probes[i], recompute=parts))

    def _probe(self, fold: Fold, base: _Base, which: int, zero: int) -> Mapping:
        """The mapping with nothing made again."""
        pipeline = base.pipelines[which]
        return mapping_of(fold, base.size, pipeline, base.dispatcher, zero, ())

    def _layer_sums(self, fold: Fold, size: int, dispatcher: str) -> _LayerSums:
        key = (fold.tp, fold.cp, size, fold.ep, fold.etp, dispatcher)
        if key not in self._layers:
            probe = Mapping(tp=fold.tp, cp=fold.cp, mbs=size, ep=fold.ep, etp=fold.etp, dispatcher=dispatcher)
            head = self.pricer.ends(fold.tp, fold.cp, size)
            forward, backward = head
            weight = hideable = 0.0
            kinds = []
            for kind, count in enumerate(self._counts):
                layer = self.pricer.layer(kind, probe)
                kinds.append(layer.forward_s + layer.backward_s)
                forward += count * layer.forward_s
                backward += count * layer.backward_s
                weight += count * layer.weight_s
                all_again = self.pricer.layer(kind, replace(probe, recompute=("layer",)))
                hideable += count * (layer.parts[_LAUNCH] - all_again.parts[_LAUNCH])
            self._layers[key] = _LayerSums(forward, backward, weight, hideable, tuple(kinds), sum(head))
        return self._layers[key]

    def _recomputes(self, fold: Fold, base: _Base) -> list[tuple[float, Parts]]:
        """The sets of parts to make again, by the seconds that this adds to all layers of a micro-batch."""
        key = (fold.tp, fold.cp, base.size, fold.ep, fold.etp, base.dispatcher)
        if key not in self._sets:
            seconds = dict.fromkeys(RECOMPUTE_PARTS, 0.0)
            times = self.pricer.times
            for kind, count in enumerate(self._counts):
                mixer = times.mixer(kind, *key[:3])
                feed_forward = times.feed_forward(kind, *key)
                for part, again in (*mixer.recompute, *feed_forward.recompute):
                    seconds[part] += count * again
                seconds["layer"] += count * sum(work.seconds for work in (*mixer.forward, *feed_forward.forward))
            self._sets[key] = sorted((sum(seconds[part] for part in parts), parts) for parts in self.space.recomputes)
        return self._sets[key]


_LAUNCH = PARTS.index("launch")


def mapping_of(fold: Fold, size: int, pipeline: Pipeline, dispatcher: str, zero: int, recompute: Parts) -> Mapping:
    """The mapping of the choices on all levels."""
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
        recompute=recompute,
        dispatcher=dispatcher,
        schedule=pipeline.schedule,
    )
