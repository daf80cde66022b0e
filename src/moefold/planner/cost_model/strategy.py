"""Cost model of a step for many pipelines and memory strategies at once (numpy). Torch-free.

A search evaluates one fold with one micro-batch size and dispatcher under many pipelines (schedule and virtual stages)
and many memory strategies (parts to recompute or offload). This module computes all of them on arrays of
[pipelines, strategies], with the results of `CostModel.step_time`; a test compares the two.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moefold.planner.cost_model.bubble import bubble_s
from moefold.planner.cost_model.step import STEP_OVERHEAD_S, CostModel, Seconds
from moefold.planner.mapping import ParallelMapping
from moefold.planner.memory.activations import MemoryStrategies
from moefold.planner.search.space import PipelineVariant


@dataclass(frozen=True, slots=True)
class PassTimes:
    """Seconds of the micro-batches under some pipelines, without data parallelism and the optimizer."""

    seconds: Seconds
    """Step seconds of the busiest pipeline rank: micro-batches, sends and the bubble, [pipelines, strategies]."""
    forward: Seconds
    """Seconds of one micro-batch on that rank, [pipelines, strategies]."""
    backward: Seconds
    sends_and_bubble: Seconds
    """Step seconds of sends and the bubble alone, [pipelines, strategies]."""

    def of_pipeline(self, index: int) -> "PassTimes":
        """Return the times of one pipeline, [strategies]."""
        return PassTimes(self.seconds[index], self.forward[index], self.backward[index], self.sends_and_bubble[index])

    def select(self, indices: NDArray[np.intp]) -> "PassTimes":
        """Return the times of some of the strategies."""
        every = (self.seconds, self.forward, self.backward, self.sends_and_bubble)
        return PassTimes(*(seconds[..., indices] for seconds in every))


@dataclass(frozen=True, slots=True)
class _RankContents:
    """Layers on the ranks of some pipelines; ranks with equal contents are merged."""

    counts: Seconds
    """Layers of each kind and, last, 1 with the loss, [pipelines, contents, kinds + 1]."""
    shares: Seconds
    """Share of the ranks that have these contents, [pipelines, 1, contents]."""


class StrategyCosts:
    """Cost of the mappings of one `CostModel` under all memory strategies at once."""

    def __init__(self, cost_model: CostModel) -> None:
        self.cost_model = cost_model
        self._num_layers = [
            cost_model.model_spec.layers.count(kind) for kind in range(len(cost_model.model_spec.kinds))
        ]
        self._layer_cache: dict[tuple[object, ...], tuple[Seconds, Seconds]] = {}
        self._rank_contents_cache: dict[tuple[int, tuple[PipelineVariant, ...]], _RankContents] = {}

    def layer_times(self, kind: int, mapping: ParallelMapping, strategies: MemoryStrategies) -> tuple[Seconds, Seconds]:
        """Return the cached `CostModel.layers_with_strategies`, [strategies] each."""
        m = mapping
        key = (
            *(kind, m.tp, m.cp, m.mbs, m.ep, m.etp, m.dispatcher, m.overlap),
            self.cost_model.attention_peers(mapping),
        )
        if key not in self._layer_cache:
            self._layer_cache[key] = self.cost_model.layer_s_with_strategies(kind, mapping, strategies)
        return self._layer_cache[key]

    def lower_bound_passes(self, mapping: ParallelMapping, strategies: MemoryStrategies) -> Seconds:
        """Return a lower bound of a step's seconds over all pipelines: micro-batches on the busiest rank."""
        cost_model = self.cost_model
        seconds = np.full(len(strategies), sum(cost_model.head_and_loss_s(mapping.tp, mapping.cp, mapping.mbs)))
        for kind, count in enumerate(self._num_layers):
            seconds += count * sum(self.layer_times(kind, mapping, strategies))
        return mapping.num_micro_batches(cost_model.workload.global_batch_size) / mapping.pp * seconds

    def pass_times(
        self,
        mapping: ParallelMapping,
        pipelines: tuple[PipelineVariant, ...],
        strategies: MemoryStrategies,
        indices: NDArray[np.intp] | None = None,
    ) -> PassTimes:
        """Compute the times of the pipelines.

        Args:
            mapping: the mapping; its schedule and virtual stages do not count.
            pipelines: pipelines that are legal with it.
            strategies: the strategies; equal for all mappings with, or without, overlap.
            indices: indices of the strategies to price; None: all.
        """
        layers = [self.layer_times(kind, mapping, strategies) for kind in range(len(self._num_layers))]
        if indices is not None:
            layers = [(forward[indices], backward[indices]) for forward, backward in layers]
        return self._price_passes(mapping, pipelines, np.array(layers))

    def plain_pass_times(self, mapping: ParallelMapping, pipelines: tuple[PipelineVariant, ...]) -> PassTimes:
        """Compute the times of the pipelines without recomputation and offload, [pipelines, 1].

        They are lower bounds: every memory strategy makes passes longer.
        """
        layers = np.array([self.cost_model.plain_layer_s(kind, mapping) for kind in range(len(self._num_layers))])
        return self._price_passes(mapping, pipelines, layers[:, :, None])

    def _price_passes(
        self, mapping: ParallelMapping, pipelines: tuple[PipelineVariant, ...], layers: Seconds
    ) -> PassTimes:
        """Compute the times of the pipelines from their layers, forward and backward, [kinds, 2, strategies]."""
        cost_model = self.cost_model
        layer_costs = self.cost_model.layer_costs
        n = mapping.num_micro_batches(cost_model.workload.global_batch_size)
        ranks = self._rank_contents(mapping.pp, pipelines)
        head = cost_model.head_and_loss_s(mapping.tp, mapping.cp, mapping.mbs)
        counts = ranks.counts[:, :, :-1]
        has_loss = ranks.counts[:, :, -1:]
        forward = counts @ layers[:, 0] + has_loss * head[0]
        backward = counts @ layers[:, 1] + has_loss * head[1]
        slowest = _slowest_rank(forward, backward)
        weights = [
            cost_model.mixer_time(kind, mapping).wgrad_s
            + layer_costs.feed_forward(
                kind, mapping.tp, mapping.cp, mapping.mbs, mapping.ep, mapping.etp, mapping.dispatcher
            ).wgrad_s
            for kind in range(len(layers))
        ]
        weight = (ranks.shares @ (counts @ np.array(weights))[:, :, None])[:, 0]
        mean = [(ranks.shares @ seconds)[:, 0] for seconds in (forward, backward)]
        sends, send_back = cost_model.exposed_p2p_s(mapping, np.array([[pipeline.vpp] for pipeline in pipelines]), n)
        sends_and_bubble = sends + _bubbles(
            (mean[0] + send_back, mean[1] + send_back, weight), mapping.pp, n, pipelines
        )
        return PassTimes(n * (slowest[0] + slowest[1]) + sends_and_bubble, slowest[0], slowest[1], sends_and_bubble)

    def add_data_parallel_s(self, pass_times: PassTimes, mapping: ParallelMapping, num_micro_batches: int) -> Seconds:
        """Return the total seconds of a step, [strategies].

        Args:
            pass_times: times of one pipeline.
            mapping: a mapping with that pipeline, its ZeRO stage and the placement of its moments.
            num_micro_batches: micro-batches of a step.
        """
        data_parallel = self.cost_model.data_parallel_cost(mapping)
        exposed_s = self.cost_model.data_parallel.exposed_s(
            mapping, data_parallel, pass_times.forward, pass_times.backward, num_micro_batches
        )
        seconds: Seconds = pass_times.seconds + exposed_s + data_parallel.optimizer_s + STEP_OVERHEAD_S
        return seconds

    def step_times(self, mapping: ParallelMapping, strategies: MemoryStrategies) -> Seconds:
        """Return the `step_time` of a mapping, which neither recomputes nor offloads, under each strategy."""
        passes = self.pass_times(mapping, (PipelineVariant(mapping.schedule, mapping.vpp),), strategies).of_pipeline(0)
        return self.add_data_parallel_s(
            passes, mapping, mapping.num_micro_batches(self.cost_model.workload.global_batch_size)
        )

    def _rank_contents(self, pp: int, pipelines: tuple[PipelineVariant, ...]) -> _RankContents:
        key = (pp, pipelines)
        if key not in self._rank_contents_cache:
            self._rank_contents_cache[key] = self._count_rank_contents(pp, pipelines)
        return self._rank_contents_cache[key]

    def _count_rank_contents(self, pp: int, pipelines: Sequence[PipelineVariant]) -> _RankContents:
        all_contents: list[dict[tuple[int, ...], int]] = []
        for pipeline in pipelines:
            found: dict[tuple[int, ...], int] = {}
            for layers, _, has_loss in self.cost_model.rank_contents(pp, pipeline.vpp, pipeline.schedule):
                row = (*layers, int(has_loss))
                found[row] = found.get(row, 0) + 1
            all_contents.append(found)
        max_contents = max(map(len, all_contents))
        width = len(self.cost_model.model_spec.kinds) + 1
        # Padding: contents that no rank has.
        counts: Seconds = np.zeros((len(all_contents), max_contents, width))
        shares: Seconds = np.zeros((len(all_contents), 1, max_contents))
        for i, contents in enumerate(all_contents):
            counts[i, : len(contents)] = list(contents)
            shares[i, 0, : len(contents)] = [number / pp for number in contents.values()]
        return _RankContents(counts, shares)


def _slowest_rank(forward: Seconds, backward: Seconds) -> tuple[Seconds, Seconds]:
    """Return the forward and backward seconds of the slowest rank, the first of equal ones, [pipelines, strategies].

    The inputs are [pipelines, contents, strategies].
    """
    # One content after another: contents are few, and argmax over an inner axis is many times slower.
    slowest_forward = forward[:, 0].copy()
    slowest_backward = backward[:, 0].copy()
    both = forward + backward
    longest = both[:, 0]
    for i in range(1, both.shape[1]):
        is_longer = both[:, i] > longest
        for found, seconds in ((slowest_forward, forward), (slowest_backward, backward), (longest, both)):
            np.copyto(found, seconds[:, i], where=is_longer)
    return slowest_forward, slowest_backward


def _bubbles(
    mean: tuple[Seconds, Seconds, Seconds], pp: int, num_micro_batches: int, pipelines: tuple[PipelineVariant, ...]
) -> Seconds:
    """Return the idle seconds of a rank in a step, [pipelines, strategies]."""
    found = np.zeros_like(mean[0])
    for schedule in dict.fromkeys(p.schedule for p in pipelines):
        which = [i for i, p in enumerate(pipelines) if p.schedule == schedule]
        vpp = np.array([[pipelines[i].vpp] for i in which])
        forward, backward, weight = (seconds[which] for seconds in mean)
        found[which] = bubble_s(
            forward, backward, weight, pp=pp, vpp=vpp, num_micro_batches=num_micro_batches, schedule=schedule
        )
    return found
