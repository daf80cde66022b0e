"""Seconds of a step for many pipelines, and all that saves activations, at once. Torch-free.

What a search asks of one fold with one micro-batch size and dispatcher is the same sum with other numbers for each
pipeline (schedule and virtual stages) and each saver (parts that run again or leave memory), so it is taken once, over
arrays of [pipelines, savers]. It says of each what `Pricer.step_time` says of it by itself; a test compares the two.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf

import numpy as np
from numpy.typing import NDArray

from moefold.plan.kept import Savers
from moefold.plan.mapping import Mapping
from moefold.plan.pipeline_time import bubble_s
from moefold.plan.space import Pipeline
from moefold.plan.step_time import STEP_S, Pricer, Seconds


@dataclass(frozen=True, slots=True)
class Passes:
    """What micro-batches take under some pipelines, data parallelism and the optimizer left out."""

    seconds: Seconds
    """Of a step, [pipelines, savers]: the busiest pipeline rank's micro-batches, sends and the bubble."""
    forward: Seconds
    """Of one micro-batch on that rank, [pipelines, savers]."""
    backward: Seconds
    beside: Seconds
    """Of a step, [pipelines, savers]: sends and the bubble alone."""

    def of(self, which: int) -> "Passes":
        """Those of one pipeline, [savers]."""
        return Passes(self.seconds[which], self.forward[which], self.backward[which], self.beside[which])

    def at(self, which: NDArray[np.intp]) -> "Passes":
        """With some of the savers."""
        every = (self.seconds, self.forward, self.backward, self.beside)
        return Passes(*(seconds[..., which] for seconds in every))


@dataclass(frozen=True, slots=True)
class _Ranks:
    """What the ranks of some pipelines have, those that have the same counted together."""

    counts: Seconds
    """Layers of each kind and, last, whether there is the loss, [pipelines, contents, kinds + 1]."""
    shares: Seconds
    """Of the ranks, that have these contents, [pipelines, 1, contents]."""


class SaverTimes:
    """Prices mappings of one `Pricer` with all savers at once."""

    def __init__(self, pricer: Pricer) -> None:
        self.pricer = pricer
        self._num_layers = [pricer.shape.layers.count(kind) for kind in range(len(pricer.shape.kinds))]
        self._layers: dict[tuple[object, ...], tuple[Seconds, Seconds]] = {}
        self._ranks: dict[tuple[int, tuple[Pipeline, ...]], _Ranks] = {}
        self._parameters: dict[tuple[object, ...], tuple[float, ...]] = {}

    def layers(self, kind: int, m: Mapping, savers: Savers) -> tuple[Seconds, Seconds]:
        """Seconds of one layer forward and backward with each of some savers, of which `m` has none; [savers] each."""
        key = (kind, m.tp, m.cp, m.mbs, m.ep, m.etp, m.dispatcher, m.overlap)
        if key not in self._layers:
            self._layers[key] = self.pricer.saved_layers(kind, m, savers)
        return self._layers[key]

    def least_passes(self, m: Mapping, savers: Savers) -> Seconds:
        """Seconds at least of the micro-batches of a step on the busiest pipeline rank, whatever the pipeline."""
        pricer = self.pricer
        seconds = np.full(len(savers), sum(pricer.ends(m.tp, m.cp, m.mbs)))
        for kind, count in enumerate(self._num_layers):
            seconds += count * sum(self.layers(kind, m, savers))
        return m.num_micro_batches(pricer.workload.global_batch_size) / m.pp * seconds

    def passes(
        self, m: Mapping, pipelines: tuple[Pipeline, ...], savers: Savers, which: NDArray[np.intp] | None = None
    ) -> Passes:
        """Price the pipelines.

        Args:
            m: the mapping; its schedule and virtual stages do not count.
            pipelines: that are legal with it.
            savers: the same ones for all mappings with or without overlap.
            which: numbers of those that are priced; None: all.
        """
        layers = [self.layers(kind, m, savers) for kind in range(len(self._num_layers))]
        if which is not None:
            layers = [(ahead[which], behind[which]) for ahead, behind in layers]
        return self._passes(m, pipelines, np.array(layers))

    def plain_passes(self, m: Mapping, pipelines: tuple[Pipeline, ...]) -> Passes:
        """With each of some pipelines where nothing saves activations, [pipelines, 1].

        Whatever does makes passes longer, and no sum of them shorter.
        """
        layers = np.array([self.pricer.plain_layer(kind, m) for kind in range(len(self._num_layers))])
        return self._passes(m, pipelines, layers[:, :, None])

    def _passes(self, m: Mapping, pipelines: tuple[Pipeline, ...], layers: Seconds) -> Passes:
        """Price the pipelines from their layers of each kind, forward and backward, [kinds, 2, savers]."""
        pricer, times = self.pricer, self.pricer.times
        n = m.num_micro_batches(pricer.workload.global_batch_size)
        ranks, head = self._contents(m.pp, pipelines), pricer.ends(m.tp, m.cp, m.mbs)
        counts, has_loss = ranks.counts[:, :, :-1], ranks.counts[:, :, -1:]
        forward = counts @ layers[:, 0] + has_loss * head[0]
        backward = counts @ layers[:, 1] + has_loss * head[1]
        slowest = _busiest(forward, backward)
        weights = [
            times.mixer(kind, m.tp, m.cp, m.mbs).weight_s
            + times.feed_forward(kind, m.tp, m.cp, m.mbs, m.ep, m.etp, m.dispatcher).weight_s
            for kind in range(len(layers))
        ]
        weight = (ranks.shares @ (counts @ np.array(weights))[:, :, None])[:, 0]
        mean = [(ranks.shares @ seconds)[:, 0] for seconds in (forward, backward)]
        sends, send_back = pricer.sends(m, np.array([[pipeline.vpp] for pipeline in pipelines]), n)
        beside = sends + _bubbles((mean[0] + send_back, mean[1] + send_back, weight), m.pp, n, pipelines)
        return Passes(n * (slowest[0] + slowest[1]) + beside, slowest[0], slowest[1], beside)

    def with_replicas(self, passes: Passes, m: Mapping, n: int) -> Seconds:
        """Seconds of a step in all, [savers].

        Args:
            passes: of one pipeline.
            m: a mapping with that pipeline, with what is sharded and the home of its moments.
            n: micro-batches.
        """
        replicas = self.pricer.replicas(m)
        shown = self.pricer.shown_replicas_s(m, replicas, passes.forward, passes.backward, n)
        seconds: Seconds = passes.seconds + shown + replicas.optimizer_s + STEP_S
        return seconds

    def least_replicas_s(self, m: Mapping, pipelines: tuple[Pipeline, ...], n: int) -> float:
        """Seconds of a step at least that data parallelism and the optimizer add to `passes`, whatever the pipeline.

        Args:
            m: a mapping with what is sharded and the home of its moments; its pipeline does not count.
            pipelines: of which it has one.
            n: micro-batches.
        """
        key = (m.tp, m.ep * m.etp, m.pp, pipelines)
        if key not in self._parameters:
            sizes = [self.pricer.parameters(replace(m, schedule=p.schedule, vpp=p.vpp)) for p in pipelines]
            self._parameters[key] = tuple(map(min, zip(*sizes, strict=True)))
        least = self.pricer.least_replicas(m, self._parameters[key])
        # As if there was time without end to hide them.
        return least.optimizer_s + float(self.pricer.shown_replicas_s(m, least, inf, inf, n))

    def step_times(self, m: Mapping, savers: Savers) -> Seconds:
        """Seconds of a step with each of some savers, of which `m` has none: what `step_time` says of each."""
        passes = self.passes(m, (Pipeline(m.schedule, m.vpp),), savers).of(0)
        return self.with_replicas(passes, m, m.num_micro_batches(self.pricer.workload.global_batch_size))

    def _contents(self, pp: int, pipelines: tuple[Pipeline, ...]) -> _Ranks:
        key = (pp, pipelines)
        if key not in self._ranks:
            self._ranks[key] = self._counted(pp, pipelines)
        return self._ranks[key]

    def _counted(self, pp: int, pipelines: Sequence[Pipeline]) -> _Ranks:
        every: list[dict[tuple[int, ...], int]] = []
        for pipeline in pipelines:
            found: dict[tuple[int, ...], int] = {}
            for layers, _, has_loss in self.pricer.contents_of_ranks(pp, pipeline.vpp, pipeline.schedule):
                row = (*layers, int(has_loss))
                found[row] = found.get(row, 0) + 1
            every.append(found)
        most, width = max(map(len, every)), len(self.pricer.shape.kinds) + 1
        # Rows that are left over have nothing and are no rank's.
        counts: Seconds = np.zeros((len(every), most, width))
        shares: Seconds = np.zeros((len(every), 1, most))
        for i, contents in enumerate(every):
            counts[i, : len(contents)] = list(contents)
            shares[i, 0, : len(contents)] = [number / pp for number in contents.values()]
        return _Ranks(counts, shares)


def _busiest(forward: Seconds, backward: Seconds) -> tuple[Seconds, Seconds]:
    """Of ranks [pipelines, contents, savers] those that take longest, the first of equal ones, [pipelines, savers]."""
    # One content after another: contents are few, and argmax over an inner axis is many times slower.
    ahead, behind, both = forward[:, 0].copy(), backward[:, 0].copy(), forward + backward
    longest = both[:, 0]
    for i in range(1, both.shape[1]):
        is_longer = both[:, i] > longest
        for found, seconds in ((ahead, forward), (behind, backward), (longest, both)):
            np.copyto(found, seconds[:, i], where=is_longer)
    return ahead, behind


def _bubbles(mean: tuple[Seconds, Seconds, Seconds], pp: int, n: int, pipelines: tuple[Pipeline, ...]) -> Seconds:
    """Idle seconds of a rank in a step, [pipelines, savers]."""
    found = np.zeros_like(mean[0])
    for schedule in dict.fromkeys(p.schedule for p in pipelines):
        which = [i for i, p in enumerate(pipelines) if p.schedule == schedule]
        vpp = np.array([[pipelines[i].vpp] for i in which])
        forward, backward, weight = (seconds[which] for seconds in mean)
        found[which] = bubble_s(forward, backward, weight, pp=pp, vpp=vpp, n=n, schedule=schedule)
    return found
