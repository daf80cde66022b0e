"""Lower bounds of the seconds of a step, of every fold with every micro-batch size, as arrays.

The first bound of a pair has the layers of one micro-batch without recomputation and the least bubble. The closer one
has its pipelines, data parallelism and optimizer. It is computed for the pairs of a number of pipeline ranks together
that have equal pipelines and equally many micro-batches.
"""

from collections.abc import Collection, Hashable, Sequence
from dataclasses import replace
from functools import cached_property
from math import inf
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from moefold.config.chosen import default_part
from moefold.config.groups.dispatcher import DispatcherPart, overrides_any
from moefold.cost.memoised import memoised
from moefold.planner.cost_model.block import block_of_sums
from moefold.planner.cost_model.data_parallel import DataParallelCost
from moefold.planner.cost_model.step import STEP_OVERHEAD_S, CostModel, Seconds
from moefold.planner.mapping import ParallelMapping, PipelineVariant
from moefold.planner.search.constraints import Fold
from moefold.planner.search.memory_filter import MemoryFilter, MicroBatchChoice
from moefold.planner.search.space import AttentionView
from moefold.topology.schedules import DEFAULT_SCHEDULE, schedule_named

SizedFold = tuple[Fold, int, tuple[PipelineVariant, ...]]
"""A fold with a micro-batch size, and the pipelines that are legal with them."""


class PairTable(NamedTuple):
    """Lower bounds of the seconds of a step of every fold with every micro-batch size, in the order of the space."""

    bounds: Seconds
    """With the bound of the fold, [pairs]."""
    size_bounds: Seconds
    """Bounds of the micro-batch size alone, [pairs]."""
    dispatchers: NDArray[np.intp]
    """Index of the fastest dispatcher in `PairBounds.searched`, [pairs]."""
    layers: NDArray[np.intp]
    """Index of the layers in `layer_times_s`, [pairs]."""
    layer_times_s: Seconds
    """Seconds of a layer of each kind: forward, backward, weight gradients, [kinds, 3, layers]."""
    heads_s: Seconds
    """Seconds of the head and the loss, forward and backward, [2, layers]."""
    folds: NDArray[np.intp]
    """Number of the fold, [pairs]."""
    sizes: NDArray[np.intp]
    """Index of the micro-batch size in the view, [pairs]."""
    views: NDArray[np.intp]
    """Number of the view of each fold, [folds]."""
    experts: NDArray[np.intp]
    """Index of the degrees of the experts of each fold, [folds]."""


class PairBounds:
    """Lower bounds of all pairs of a fold and a micro-batch size of a space.

    Args:
        batch: pairs with as many pipeline ranks whose step is bounded at once.
    """

    def __init__(self, cost_model: CostModel, memory: MemoryFilter, batch: int) -> None:
        self.cost_model = cost_model.lower_bounds
        self.space = memory.space
        self._placements = memory.placements
        self._batch = batch

    def fold_of(self, pair: int) -> tuple[Fold, AttentionView]:
        """Return the fold of a pair, and its attention view."""
        table = self.table
        fold = table.folds[pair]
        view = self.space.views[table.views[fold]]
        return self.space.fold_of(view, table.experts[fold]), view

    def sized_fold(self, pair: int) -> SizedFold:
        """Return the fold of a pair, its micro-batch size and its pipelines."""
        fold, view = self.fold_of(pair)
        return fold, *view.pipelines_by_mbs[self.table.sizes[pair]]

    def step_bound(self, pair: int, zeros: Collection[int]) -> tuple[float, float]:
        """Return lower bounds of the seconds of the micro-batches of a step, and of a step with some ZeRO stages."""
        if np.isnan(self._passes_s[pair]):
            later = self._order[self._place[pair] :]
            pairs = later[self._pp[later] == self._pp[pair]][: self._batch]
            self._passes_s[pairs], self._steps_s[pairs] = self._step_bounds(self.cost_model, pairs)
        return float(self._passes_s[pair]), self._least_s(self._steps_s[pair], zeros)

    def step_bound_under(self, model: CostModel, pair: int, zeros: Collection[int]) -> tuple[float, float]:
        """Return the bounds of `step_bound` by another cost model."""
        passes_s, steps_s = self._step_bounds(model, np.array([pair]))
        return float(passes_s[0]), self._least_s(steps_s[0], zeros)

    def _least_s(self, steps_s: Seconds, zeros: Collection[int]) -> float:
        own = (seconds for seconds, (zero, _) in zip(steps_s.tolist(), self._placements, strict=True) if zero in zeros)
        return min(own, default=inf)

    @cached_property
    def _order(self) -> NDArray[np.intp]:
        """The pairs, lowest bound first."""
        return np.argsort(self.table.bounds, kind="stable")

    @cached_property
    def _place(self) -> NDArray[np.intp]:
        """Place of each pair in `_order`."""
        return np.argsort(self._order)

    @cached_property
    def _pp(self) -> NDArray[np.intp]:
        """Pipeline ranks of each pair."""
        return np.array([view.pp for view in self.space.views], dtype=np.intp)[self.table.views[self.table.folds]]

    @cached_property
    def _passes_s(self) -> Seconds:
        """Bounds of the micro-batches of a step, nan where not computed yet, [pairs]."""
        return np.full(len(self.table.bounds), np.nan)

    @cached_property
    def _steps_s(self) -> Seconds:
        """Bounds of a step, [pairs, placements]."""
        return np.zeros((len(self.table.bounds), len(self._placements)))

    def _step_bounds(self, model: CostModel, pairs: NDArray[np.intp]) -> tuple[Seconds, Seconds]:
        """Return the bounds of some pairs by a cost model, [pairs] and [pairs, placements]."""
        groups: dict[Hashable, list[int]] = {}
        sized = [self.sized_fold(pair) for pair in pairs.tolist()]
        for i, (fold, size, pipelines) in enumerate(sized):
            groups.setdefault((fold.pp, fold.dp * size, pipelines), []).append(i)
        passes_s = np.empty(len(pairs))
        steps_s = np.empty((len(pairs), len(self._placements)))
        for places in groups.values():
            pipelines = plain_pipelines(*sized[places[0]][::2])
            choices = []
            for i in places:
                fastest = self.searched[self.table.dispatchers[pairs[i]]]
                choices.append(MicroBatchChoice(*sized[i][:2], fastest, False, pipelines))
            passes_s[places], steps_s[places] = self._bounds_of_group(model, choices, pairs[places])
        return passes_s, steps_s

    def _bounds_of_group(
        self, model: CostModel, choices: Sequence[MicroBatchChoice], pairs: NDArray[np.intp]
    ) -> tuple[Seconds, Seconds]:
        """Return the bounds of pairs with equal pipelines and numbers of micro-batches."""
        mappings = [choice.mapping() for choice in choices]
        pipelines = choices[0].pipelines
        own = self.table.layers[pairs]
        times, heads = self.table.layer_times_s[..., own], self.table.heads_s[:, own]
        if model is not self.cost_model:
            # Overlap only hides communication.
            overlapped = [replace(m, overlap=True) for m in mappings]
            kinds = range(len(model.kind_counts))
            times = np.array([[model.plain_layer_s(kind, m) for m in overlapped] for kind in kinds]).swapaxes(1, 2)
            heads = np.array([model.head_and_loss_s(m) for m in mappings]).T
        sends_s = np.array([model.p2p_s(m) for m in mappings])
        n = mappings[0].num_micro_batches(model.workload.global_batch_size)
        passes = model.passes(mappings[0].pp, n, pipelines, list(times.swapaxes(0, 1)), heads, sends_s)
        steps = np.full((len(pairs), len(self._placements)), inf)
        stages = {zero for zero, _ in self._placements}
        for column, (zero, moments) in enumerate(self._placements):
            if zero == 2 and 1 in stages:
                # ZeRO-2 only reduces more often than ZeRO-1.
                steps[:, column] = steps[:, self._placements.index((1, moments))]
                continue
            comm = self._data_parallel_costs(model, choices, zero, moments)
            probe = choices[0].mapping(None, zero, moments)
            step_s = passes.seconds + model.data_parallel.exposed_s(probe, comm, passes.forward_s, passes.backward_s, n)
            steps[:, column] = (step_s + comm.optimizer_s).min(axis=0) + STEP_OVERHEAD_S
        return passes.seconds.min(axis=0), steps

    def _data_parallel_costs(
        self, model: CostModel, choices: Sequence[MicroBatchChoice], zero: int, moments: str
    ) -> DataParallelCost:
        """Return the costs of data parallelism of each pipeline and pair, [pipelines, pairs]."""
        folds = {(c.fold.tp, c.fold.ep, c.fold.etp): c for c in choices}
        stages = {(p.vpp, schedule_named(p.schedule).placement): p for p in choices[0].pipelines}
        price = model.data_parallel.cost
        costs = np.array([[price(c.mapping(p, zero, moments)) for c in folds.values()] for p in stages.values()])
        fold_at = {key: i for i, key in enumerate(folds)}
        stage_at = {key: i for i, key in enumerate(stages)}
        of_folds = [fold_at[c.fold.tp, c.fold.ep, c.fold.etp] for c in choices]
        of_pipelines = [stage_at[p.vpp, schedule_named(p.schedule).placement] for p in choices[0].pipelines]
        return DataParallelCost(*np.moveaxis(costs, 2, 0)[:, of_pipelines][:, :, of_folds])

    def _passes_on_rank(self, view: AttentionView) -> list[tuple[int, float]]:
        """Return each micro-batch size with a lower bound of a pipeline rank's time, in passes through the whole model.

        A bubble is (pp - 1) / vpp forward passes of a rank or longer, a third of both passes.
        """
        found = []
        for mbs, pipelines in view.pipelines_by_mbs:
            n = self.cost_model.workload.global_batch_size // (mbs * view.dp)
            most = max(pipeline.vpp for pipeline in pipelines)
            found.append((mbs, (n + (view.pp - 1) / (3 * most) if view.pp > 1 else n) / view.pp))
        return found

    @cached_property
    def searched(self) -> tuple[DispatcherPart, ...]:
        """The dispatchers in the order of `dispatchers`."""
        return tuple(reversed(self.space.searched_dispatchers))

    @cached_property
    def table(self) -> PairTable:
        """Bounds of the layers of one micro-batch without recomputation, and the least bubble.

        The bound of a fold has the kernels of its largest micro-batches, which are the most efficient.
        """
        space = self.space
        views = space.views
        sized = [(view, *one) for view in views for one in self._passes_on_rank(view)]
        sizes_of = np.array([len(view.pipelines_by_mbs) for view in views], dtype=np.intp)
        first_of = np.cumsum(sizes_of) - sizes_of
        experts_of = [space.experts_of(view) for view in views]
        view_of = np.repeat(np.arange(len(views)), [len(own) for own in experts_of])
        expert_of = np.array([at for own in experts_of for at in own], dtype=np.intp)
        # Each pair: its fold, and its view with a micro-batch size.
        num_sizes = sizes_of[view_of]
        fold = np.repeat(np.arange(len(view_of)), num_sizes)
        last = np.cumsum(num_sizes) - 1
        size = np.arange(len(fold)) - (last - num_sizes + 1)[fold]
        sized_view = first_of[view_of[fold]] + size
        # Equal layers are priced once. With documents the other degrees of attention decide too who waits.
        has_documents = self.cost_model.workload.attention is not None
        numbers: dict[Hashable, int] = {}
        keys = ((view.tp, view.cp, mbs, view.dp if has_documents else 0) for view, mbs, _ in sized)
        mixer_of = np.array([numbers.setdefault(key, len(numbers)) for key in keys], dtype=np.intp)
        code = mixer_of[sized_view] * len(space.expert_degrees) + expert_of[fold]
        is_used = np.zeros(len(numbers) * len(space.expert_degrees), dtype=bool)
        is_used[code] = True
        used = np.flatnonzero(is_used)
        first_with = np.unique(mixer_of, return_index=True)[1].tolist()
        own_sizes = [sized[i][:2] for i in first_with]
        seconds, dispatchers, times, heads = self._layers_s(
            own_sizes, *np.divmod(used, max(1, len(space.expert_degrees)))
        )
        layers = (np.cumsum(is_used) - 1)[code]
        layers_s = seconds[layers]
        passes = np.array([passes for *_, passes in sized])
        mbs_of = np.array([mbs for _, mbs, _ in sized])
        least = np.minimum.reduceat(passes * mbs_of, first_of) if len(views) else passes
        largest = mbs_of[sized_view[last]]
        bounds_of_folds = least[view_of] * (layers_s[last] / largest)
        size_bounds = passes[sized_view] * layers_s
        bounds = np.maximum(bounds_of_folds[fold], size_bounds)
        return PairTable(bounds, size_bounds, dispatchers[layers], layers, times, heads, fold, size, view_of, expert_of)

    def _layers_s(
        self, sizes: Sequence[tuple[AttentionView, int]], mixer_of: NDArray[np.intp], expert_of: NDArray[np.intp]
    ) -> tuple[Seconds, NDArray[np.intp], Seconds, Seconds]:
        """Return the seconds of all layers, the head and the loss for one micro-batch, least over the dispatchers.

        Overlap only hides communication. Without a legal dispatcher the seconds are inf.

        Args:
            sizes: attention views with a micro-batch size.
            mixer_of: index of each layer's view in `sizes`.
            expert_of: index of its expert degrees.

        Returns:
            Seconds, indices of the dispatchers in `searched`, `PairTable.layer_times_s` and `PairTable.heads_s`.
        """
        model = self.cost_model
        costs = model.layer_costs
        expert_degrees = self.space.expert_degrees
        mappings = [ParallelMapping(tp=v.tp, cp=v.cp, dp=v.dp, pp=v.pp, mbs=mbs) for v, mbs in sizes]
        mixers = mappings
        mixer_at = mixer_of
        if model.workload.attention is not None:
            # The ranks that wait for each other depend on the degrees of the experts.
            pairs = zip(mixer_of.tolist(), expert_of.tolist(), strict=True)
            experts = ((mappings[i], expert_degrees[at]) for i, at in pairs)
            mixers = [replace(m, ep=ep, etp=etp) for m, (ep, etp) in experts]
            mixer_at = np.arange(len(mixer_of))
        places: dict[Hashable, int] = {}
        token_of = np.array([places.setdefault(costs.token_key(m), len(places)) for m in mappings])
        tokens = [mappings[i] for i in np.unique(token_of, return_index=True)[1].tolist()]
        is_legal = self._legal_dispatchers(sizes, mixer_of, expert_of)
        degrees = [
            (*pair, [part for part, own in zip(self.searched, is_legal, strict=True) if own[expert_of == at].any()])
            for at, pair in enumerate(expert_degrees)
        ]
        networks = [costs.network_sums(kind, tokens, degrees) for kind in range(len(model.kind_counts))]
        mixer_sums = [
            np.array([costs.mixer(kind, m, model.attention_peers(m)).sums for m in mixers]).T[:, mixer_at]
            for kind in range(len(model.kind_counts))
        ]
        heads = np.array([model.head_and_loss_s(m) for m in mixers]).T[:, mixer_at]
        fastest = np.zeros(len(mixer_of), dtype=np.intp)
        least = np.full(len(mixer_of), inf)
        times = np.zeros((len(model.kind_counts), 3, len(mixer_of)))
        for number, (part, legal) in enumerate(zip(self.searched, is_legal, strict=True)):
            if not legal.any():
                continue
            total = heads[:, legal].sum(axis=0)
            own = np.empty((len(times), 3, len(total)))
            for kind, count_of_kind in enumerate(model.kind_counts):
                sums = (
                    mixer_sums[kind][:, legal],
                    networks[kind][part][:, expert_of[legal], token_of[mixer_of[legal]]],
                )
                own[kind, :2] = model.plain_s((block_of_sums(sums[0]), block_of_sums(sums[1])), overlap=True)
                own[kind, 2] = sums[0][-1] + sums[1][-1]
                total += count_of_kind * (own[kind, 0] + own[kind, 1])
            is_faster = total < least[legal]
            won = np.flatnonzero(legal)[is_faster]
            fastest[won] = number
            least[won] = total[is_faster]
            times[:, :, won] = own[:, :, is_faster]
        return least, fastest, times, heads

    def _legal_dispatchers(
        self, sizes: Sequence[tuple[AttentionView, int]], mixer_of: NDArray[np.intp], expert_of: NDArray[np.intp]
    ) -> NDArray[np.bool_]:
        """Return which of `searched` are `dispatchers` of layers, as of `_layers_s`, [dispatchers, layers]."""
        space = self.space
        ratios: dict[float, int] = {}
        ratio_of = np.array([ratios.setdefault(mbs / (v.tp * v.cp), len(ratios)) for v, mbs in sizes])
        codes, places, which = np.unique(
            ratio_of[mixer_of] * len(space.expert_degrees) + expert_of, return_index=True, return_inverse=True
        )
        found = np.zeros((len(self.searched), len(codes)), dtype=bool)
        for i, place in enumerate(places.tolist()):
            view, mbs = sizes[mixer_of[place]]
            legal = self.dispatchers(space.fold_of(view, expert_of[place]), mbs)
            found[:, i] = [part in legal for part in self.searched]
        return found[:, which.reshape(-1)]

    @memoised(lambda self, fold, mbs: (fold.ep, fold.etp, mbs / (fold.tp * fold.cp)))
    def dispatchers(self, fold: Fold, mbs: int) -> tuple[DispatcherPart, ...]:
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


def plain_pipelines(fold: Fold, pipelines: tuple[PipelineVariant, ...]) -> tuple[PipelineVariant, ...]:
    """Return the pipelines to price: without pipeline parallelism all schedules take equally long."""
    return tuple(p for p in pipelines if fold.pp == 1 and p.schedule == DEFAULT_SCHEDULE) or pipelines
