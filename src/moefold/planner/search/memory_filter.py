"""Memory of the mappings of a space before any is priced: lower bounds, the mappings that may fit, and the smallest.

A lower bound of a fold has the share of a rank in the states, one gathered layer, and the inputs of its layers, the
least that recomputation leaves. It is computed at three snapshots of the step, for all folds of a view at once. Folds
are looked at by their bounds, least first, and the first mapping that fits, or whose memory is below all other bounds,
ends the walk.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import product
from math import inf
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from moefold.config.groups.dispatcher import DispatcherPart
from moefold.cost.memoised import all_arguments, memoised
from moefold.planner.mapping import OFFLOADED_OPTIMIZER, ParallelMapping, PipelineVariant
from moefold.planner.memory.activations import MemoryStrategies, has_own_memory
from moefold.planner.memory.budget import MemoryModel
from moefold.planner.memory.states import STATE_PARTS
from moefold.planner.search.constraints import Fold
from moefold.planner.search.space import HOST, AttentionView, MappingSpace
from moefold.topology.schedules import DEFAULT_SCHEDULE, schedule_named

PLAIN_PIPELINE = PipelineVariant(DEFAULT_SCHEDULE, 1)
SHARDED_PARTS = ("weights", "gradients", "optimizer")
"""Parts of the states. Every rank holds at least its share of them."""

ByteCounts = NDArray[np.float64]
SizedMapping = tuple[float, ParallelMapping]
"""Bytes of the fullest rank, and the mapping."""
Pipelines = tuple[PipelineVariant, ...]
SizesOfView = tuple[tuple[int, Pipelines], ...]
"""Micro-batch sizes with their pipelines, as in `AttentionView`."""
PipelineChoice = Callable[[Pipelines], Pipelines]
"""Function that picks the pipelines of a fold to look at."""


def small_pipelines(pipelines: tuple[PipelineVariant, ...]) -> tuple[PipelineVariant, ...]:
    """Return the pipelines with least activations: 1F1B, and schedules whose last stage is on the first rank.

    Virtual stages may balance the layers of small models better, which saves a small part of the states.
    """
    if all(p.schedule != DEFAULT_SCHEDULE for p in pipelines):
        return pipelines
    return tuple(p for p in pipelines if p.schedule == DEFAULT_SCHEDULE or schedule_named(p.schedule).placement == "v")


class MicroBatchChoice(NamedTuple):
    """A fold with a micro-batch size, a dispatcher and overlap, and the pipelines that are legal with them."""

    fold: Fold
    mbs: int
    dispatcher: DispatcherPart
    overlap: bool = False
    pipelines: tuple[PipelineVariant, ...] = (PLAIN_PIPELINE,)

    def mapping(
        self, pipeline: PipelineVariant | None = None, zero: int = 0, optimizer_placement: str = "none"
    ) -> ParallelMapping:
        """Build the mapping with one of the pipelines, the first by default, without recomputation."""
        schedule, vpp = pipeline or self.pipelines[0]
        tp, cp, dp, pp, ep, etp, edp = self.fold
        return ParallelMapping(
            tp=tp,
            cp=cp,
            dp=dp,
            pp=pp,
            ep=ep,
            etp=etp,
            edp=edp,
            vpp=vpp,
            mbs=self.mbs,
            zero=zero,
            offload=(OFFLOADED_OPTIMIZER,) if optimizer_placement == HOST else (),
            dispatcher=self.dispatcher,
            overlap=self.overlap,
            schedule=schedule,
        )


class MemoryFilter:
    """Memory of the mappings of a space."""

    def __init__(self, space: MappingSpace, memory_model: MemoryModel) -> None:
        self.space = space
        self.memory_model = memory_model
        self.placements = tuple(product(space.zero_stages, space.optimizer_placements))
        """All pairs of a ZeRO stage and a placement of the moments."""

    @property
    def usable_bytes(self) -> float:
        """Bytes that a mapping may have, with a tolerance for rounding."""
        return self.memory_model.device.memory_bytes + 1

    @cached_property
    def smallest(self) -> SizedMapping:
        """The mapping of `small_pipelines` of least memory with recomputed layers, where that is legal."""
        return min(self._walk(self.frugal_strategies), key=lambda sized: sized[0])

    @cached_property
    def min_share_fits(self) -> bool:
        """True if a rank's share of what all ranks hold, whatever the mapping, fits: some rank has at least as much."""
        columns = self.memory_model.columns
        layers = list(self.memory_model.model_spec.layers)
        held = [*layers, columns.state_column("embedding"), columns.state_column("head")]
        states = self._whole_states[:, held].sum(axis=1).min()
        saved = self._saved_bytes(1, self.frugal_strategies)[columns.layer_slice("saved")]
        num_ranks = self.space.constraints.base_config.parallel.world_size
        return float(states + saved[layers].sum()) / num_ranks + self._least_workspace < self.usable_bytes

    @cached_property
    def fits_frugally(self) -> bool:
        """True if some mapping of `small_pipelines` fits with recomputed layers, where that is legal."""
        return self.min_share_fits and self._any_fits_with(self.frugal_strategies)

    @cached_property
    def any_fits(self) -> bool:
        """True if some mapping fits, whatever its pipeline. None does without legal strategies and placements."""
        if not (self.space.strategies and self.placements):
            return False
        if self.fits_frugally or not self.min_share_fits:
            return self.fits_frugally
        others = MemoryStrategies(one for one in self.space.strategies if one not in self.frugal_strategies)
        return any(
            self._any_fits_with(some, lambda pipelines: pipelines) for some in (self.frugal_strategies, others) if some
        )

    def _small_sizes(self, view: AttentionView) -> SizesOfView:
        """Return the micro-batch sizes that may be smallest: the least, and one without accumulated gradients."""
        sizes = view.pipelines_by_mbs
        samples = self.memory_model.workload.global_batch_size // view.dp
        return tuple(one for i, one in enumerate(sizes) if i == 0 or one[0] == samples)

    def may_fit(self, choice: MicroBatchChoice) -> NDArray[np.bool_]:
        """Return whether mappings fit at three snapshots of the step, [pipelines, placements, strategies]."""
        return self._least_bytes(choice, self.space.strategies) <= self.usable_bytes

    def _least_bytes(self, choice: MicroBatchChoice, strategies: MemoryStrategies) -> ByteCounts:
        """Return the most bytes of mappings at three snapshots of the step, [pipelines, placements, strategies]."""
        # Overlap adds snapshots, of which these three have none.
        plain = choice._replace(overlap=False).mapping()
        saved = self.memory_model.activation_memory.total_bytes(plain, strategies)
        states, inputs = self._peak_counts(choice)
        held = states @ self._persistent_bytes(choice, plain).T + self.memory_model.workspace(plain)
        found: ByteCounts = (held[:, :, :, None] + (inputs @ saved.T)[:, :, None, :]).max(axis=1)
        return found

    @cached_property
    def frugal_strategies(self) -> MemoryStrategies:
        """The memory strategies that recompute whole layers, which save least, or all if these are not legal."""
        strategies = self.space.strategies
        return MemoryStrategies(one for one in strategies if "layer" in one[0]) or strategies

    def _any_fits_with(self, strategies: MemoryStrategies, pick: PipelineChoice = small_pipelines) -> bool:
        """Return whether some mapping with one of the strategies and of the pipelines fits."""
        capacity = self.memory_model.device.memory_bytes
        return any(size <= capacity for size, _ in self._walk(strategies, self.usable_bytes, pick))

    def _walk(
        self, strategies: MemoryStrategies, room: float = inf, pick: PipelineChoice = small_pipelines
    ) -> Iterator[SizedMapping]:
        """Yield mappings that may need fewer bytes than `room`, or, without it, fewer than all mappings before."""
        limit = room
        # With a room the order does not matter, so that the first mapping that fits ends the walk.
        for views in ([view] for view in self.space.views) if room < inf else [self.space.views]:
            queue: list[tuple[float, int, AttentionView, Fold]] = []
            for view in views:
                folds = self.space.folds_of(view)
                for bound, fold in zip(self._fold_bounds(view, folds, strategies, pick), folds, strict=True):
                    queue.append((bound, len(queue), view, fold))
            for bound, _, view, fold in sorted(queue, key=itemgetter(0)):
                if bound >= limit:
                    break
                # The dispatcher's own rules may forbid the smallest micro-batches.
                legal = tuple(sizes for sizes in view.pipelines_by_mbs if self.space.dispatchers(fold, sizes[0]))
                for size, pipelines in self._small_sizes(replace(view, pipelines_by_mbs=legal)):
                    for sized in self._sized(fold, size, pipelines, strategies, pick, limit):
                        limit = room if room < inf else min(limit, sized[0])
                        yield sized

    def _sized(
        self,
        fold: Fold,
        mbs: int,
        pipelines: tuple[PipelineVariant, ...],
        strategies: MemoryStrategies,
        pick: PipelineChoice,
        limit: float,
    ) -> Iterator[SizedMapping]:
        """Yield the smallest mapping of a fold below a limit for each dispatcher, pipeline and placement of states."""
        may_need_less = self.memory_model.activation_memory.may_need_less
        is_covered = False
        for dispatcher in self.space.dispatchers(fold, mbs):
            # Overlap has two micro-batches in memory, never less than one.
            runs = (
                MicroBatchChoice(fold, mbs, dispatcher, overlap, legal)
                for overlap in (False, True)
                if (legal := self.space.legal_pipelines(fold, mbs, pipelines, dispatcher, overlap))
            )
            choice = next(runs, None)
            has_own = has_own_memory(dispatcher)
            # One is enough of the dispatchers that save the same tensors.
            if choice is None or is_covered and not (has_own and may_need_less(choice.mapping())):
                continue
            is_covered = is_covered or not has_own
            choice = choice._replace(pipelines=pick(choice.pipelines))
            least_bytes = self._least_bytes(choice, strategies).min(axis=2)
            for pipeline, of_pipeline in zip(choice.pipelines, least_bytes, strict=True):
                zeros = self.space.legal_zero_stages(fold, mbs, pipeline.schedule, dispatcher, choice.overlap)
                for (zero, moments), bound in zip(self.placements, of_pipeline, strict=True):
                    if zero in zeros and bound < limit:
                        m = choice.mapping(pipeline, zero, moments)
                        totals = self.memory_model.totals(m, strategies)
                        yield float(totals.min()), with_strategy(m, strategies, int(totals.argmin()))

    def _fold_bounds(
        self, view: AttentionView, folds: Sequence[Fold], strategies: MemoryStrategies, pick: PipelineChoice
    ) -> list[float]:
        """Return a lower bound of the bytes of each fold of a view.

        It has states shared by all ranks of a stage, gathered weights of the ends and of the largest layer, the inputs
        of layers, and the gradients of one layer.
        """
        found: ByteCounts = np.full(len(folds), inf)
        columns = self.memory_model.columns
        ends = [columns.state_column(name) for name in ("embedding", "head")]
        sharded = [self._sharded_bytes(fold.tp, fold.ep, fold.etp) for fold in folds]
        gathered = np.array([columns for columns, _ in sharded])[:, None, None]
        stage = view.tp * view.cp * view.dp
        is_single = stage * view.pp == 1
        for size, pipelines in self._small_sizes(view) if folds else ():
            whole = Fold(view.tp, view.cp, view.dp, view.pp, 1, 1, stage)
            choice = MicroBatchChoice(whole, size, self._any_dispatcher, False, pick(pipelines))
            states, inputs = self._peak_counts(choice)
            held = (states @ self._whole_states.T).min(axis=2) / stage
            held += inputs @ self._saved_bytes(view.tp, strategies) * (size / view.cp)
            if not is_single:
                has_unit = states[..., columns.layer_units] > 0
                layer = (gathered[..., columns.layer_units] * has_unit).max(axis=3)
                held = held + layer + (gathered[..., ends] * states[..., ends]).sum(axis=3)
            found = np.minimum(found, held.max(axis=-1).min(axis=-1))
        bounds: list[float] = (found + [self._least_workspace if is_single else size for _, size in sharded]).tolist()
        return bounds

    @memoised(all_arguments)
    def _sharded_bytes(self, tp: int, ep: int, etp: int) -> tuple[ByteCounts, float]:
        """Return the gathered weights of each state column without padding, and the workspace without tokens."""
        mapping = ParallelMapping(tp=tp, dp=2, ep=ep, etp=etp, mbs=0)
        states = self.memory_model.state_memory.bytes_by_part(replace(mapping, mbs=1, zero=0))
        return states[STATE_PARTS.index("gathered")], self.memory_model.workspace(mapping)

    @cached_property
    def _any_dispatcher(self) -> DispatcherPart:
        return next(iter(self.space.searched_dispatchers))

    @cached_property
    def _single(self) -> MicroBatchChoice:
        """One rank with micro-batches of one sample."""
        return MicroBatchChoice(Fold(*(1 for _ in Fold._fields)), 1, self._any_dispatcher)

    @cached_property
    def _least_workspace(self) -> float:
        return self.memory_model.workspace(self._single.mapping())

    @cached_property
    def _whole_states(self) -> ByteCounts:
        """Bytes of weights, gradients and moments by state column on one rank, [placements of the moments, columns]."""
        rows = [STATE_PARTS.index(part) for part in SHARDED_PARTS]
        mappings = [self._single.mapping(None, 0, placement) for placement in self.space.optimizer_placements]
        return np.array([self.memory_model.state_memory.bytes_by_part(m)[rows].sum(axis=0) for m in mappings])

    @memoised(all_arguments)
    def _saved_bytes(self, tp: int, strategies: MemoryStrategies) -> ByteCounts:
        """Return the least bytes that layers save of one sample for their backward pass, by activation column."""
        # Rows of dropped tokens stay in memory where experts are not spread, and not where they are.
        degrees = (1, 2) if self.memory_model.model_spec.config.routed else (1,)
        mappings = [
            self._single._replace(fold=self._single.fold._replace(tp=tp, ep=ep, edp=max(1, tp // ep)), dispatcher=one)
            for ep in degrees
            for one in self.space.searched_dispatchers
        ]
        sizes = np.min(
            [self.memory_model.activation_memory.total_bytes(m.mapping(), strategies) for m in mappings],
            axis=(0, 1),
        )
        of_layers = self.memory_model.columns.layer_slice("saved")
        found: ByteCounts = np.zeros_like(sizes)
        found[of_layers] = sizes[of_layers]
        return found

    @memoised(lambda self, choice: (choice.fold.pp, choice.fold.dp * choice.mbs, choice.overlap, choice.pipelines))
    def _peak_counts(self, choice: MicroBatchChoice) -> tuple[ByteCounts, ByteCounts]:
        """Return the counts of states and activations at three snapshots, [pipelines, snapshots, columns]."""
        peaks = [self.memory_model.peak_candidates(choice.mapping(pipeline)) for pipeline in choice.pipelines]
        return np.array([peak.states for peak in peaks]), np.array([peak.activations for peak in peaks])

    def _persistent_key(self, choice: MicroBatchChoice, m: ParallelMapping) -> tuple[Any, ...]:
        accumulates = m.num_micro_batches(self.memory_model.workload.global_batch_size) > 1
        return choice.fold, accumulates, self.memory_model.state_memory.exchange_bytes(m)

    @memoised(_persistent_key)
    def _persistent_bytes(self, choice: MicroBatchChoice, mapping: ParallelMapping) -> ByteCounts:
        """Return the bytes of each state column for each ZeRO stage and placement of the moments.

        Args:
            mapping: a mapping of the choice.
        """
        mappings = (choice.mapping(None, *placement) for placement in self.placements)
        return np.array([self.memory_model.state_memory.total_bytes(m) for m in mappings])


def with_strategy(mapping: ParallelMapping, strategies: MemoryStrategies, index: int) -> ParallelMapping:
    """Return a mapping with the memory strategy of an index."""
    recompute, offload = strategies[index]
    return replace(mapping, recompute=recompute, offload=(*offload, *mapping.offload))
