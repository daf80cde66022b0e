"""Peak memory of each pipeline rank in a step: states and the activations in flight."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from moefold.config.base.part import kind_or_part
from moefold.config.chosen import chosen_in
from moefold.config.groups.layer_sizes import KernelProfile
from moefold.config.groups.optimizer import OptimizerPart
from moefold.config.groups.schedule import SchedulePart
from moefold.config.schema import Config
from moefold.cost.activation_columns import activation_table, end_table, layer_table, recomputes_comm, without_offloaded
from moefold.cost.activation_memory import ActivationMemory, activation_memory
from moefold.cost.forward_memory import forward_activations, forward_messages
from moefold.cost.graph_memory import graph_bytes
from moefold.cost.memory_columns import ByteTable, ModelChunk, columns_of
from moefold.cost.peak_candidates import PipelineStages, RankSnapshots, StepSchedule, StepSnapshots
from moefold.cost.rank_state_memory import RankStateMemory, recipe_stages
from moefold.cost.saved_tensors import CUDA_KERNELS, PARTS
from moefold.cost.state_bytes import StateBytes
from moefold.topology.schedules import overlaps_micro_batches, schedule_rows, schedule_slots


@dataclass(frozen=True, slots=True)
class ActivationPeak:
    """Peak activation memory of a pipeline rank within a step."""

    total: int
    by_part: dict[str, int]
    in_flight: dict[int, int]
    """Micro-batches in flight at the peak, for each stage of the rank."""


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Memory of one pipeline rank, for the data-parallel member that has most."""

    pp_rank: int
    states: StateBytes
    """State bytes, without moments offloaded by `train.offload_optimizer`."""
    activations: ActivationPeak
    optimizer_in_transit: int = 0
    """Offloaded moments, and copies of weights, in memory during the update, as far as they exceed the activations
    freed by then."""
    graphs: int = 0
    """Fixed addresses of CUDA graphs, see `graph_bytes`."""

    @property
    def total(self) -> int:
        """Peak bytes, without kernel workspaces."""
        states = self.states
        resting = states.weights + states.gathered + states.optimizer + states.buffers + self.graphs
        gradients = max(states.gradients, states.gradient_sums)
        return resting + gradients + self.activations.total + self.optimizer_in_transit


def compute_rank_memory(
    cfg: Config,
    *,
    recompute: Iterable[str] | None = None,
    offload: Iterable[str] = (),
    kernels: KernelProfile = CUDA_KERNELS,
    imbalance: float = 1.0,
    states: RankStateMemory | None = None,
) -> tuple[RankMemory, ...]:
    """Return the peak memory of each pipeline rank.

    Args:
        cfg: a recipe that `check_config` passed.
        recompute: parts that are recomputed. None: the recipe's parts.
        offload: parts whose saved tensors are offloaded between the passes, all of them in time: with
            `train.offload_waits`, or where copies keep up, and with `train.offload_min_kib` = 0.
        imbalance: routed tokens of the busiest rank over the mean of all ranks.
        states: state memory of the recipe, if the caller has it already.
    """
    states = states or RankStateMemory(cfg, kernels)
    formula = activation_memory(cfg, recompute, kernels, imbalance)
    optimizer = chosen_in(cfg.train, OptimizerPart)
    if not optimizer.needs_gradients:
        return _forward_rank_memory(formula, states, *recipe_stages(cfg))
    kinds = cfg.model.distinct_kinds
    table = activation_table([layer_table(formula, kind) for kind in kinds], end_table(formula))
    table = without_offloaded(table, columns_of(kinds), offload)
    chunks, _ = recipe_stages(cfg)
    found = []
    ranks = zip(_rank_snapshots(cfg), states.max_by_pp_rank, states.offloaded_moments, strict=True)
    for rank, (snapshots, state_bytes, moments) in enumerate(ranks):
        peak = _activation_peak(snapshots, formula, table)
        resident = replace(state_bytes, optimizer=state_bytes.optimizer - moments.offloaded)
        # As many bytes as the gradients.
        copies = state_bytes.gradients if optimizer.copies_weights else 0
        update = max(0, moments.in_transit + copies - peak.total)
        in_flight = [int(snapshots.in_flight[:, stage].max()) for stage in snapshots.stages]
        graphs = graph_bytes(cfg.run.cuda_graphs, formula, [chunks[stage] for stage in snapshots.stages], in_flight)
        found.append(RankMemory(rank, resident, peak, update, graphs))
    return tuple(found)


def _forward_rank_memory(
    formula: ActivationMemory,
    states: RankStateMemory,
    chunks: Sequence[ModelChunk],
    stages_by_rank: Sequence[Sequence[int]],
) -> tuple[RankMemory, ...]:
    """Return the peak memory of each pipeline rank in a step without a backward pass."""
    found = []
    rows = schedule_slots(formula.model, formula.parallel, formula.train)
    for rank, messages in enumerate(forward_messages(rows, stages_by_rank)):
        by_part = forward_activations(formula, [chunks[stage] for stage in stages_by_rank[rank]])
        by_part["pipeline"] += messages * formula.hidden_bytes
        in_flight = dict.fromkeys(stages_by_rank[rank], 1)
        peak = ActivationPeak(by_part.total(), {part: size for part, size in by_part.items() if size}, in_flight)
        found.append(RankMemory(rank, states.max_by_pp_rank[rank], peak))
    return tuple(found)


@lru_cache(maxsize=1)
def _rank_snapshots(cfg: Config) -> tuple[RankSnapshots, ...]:
    """Return the snapshots of each pipeline rank, which are the same whatever is recomputed."""
    p = cfg.parallel
    whole = StepSchedule(
        kind_or_part(p.schedule),
        p.pp,
        p.virtual_stages,
        cfg.num_micro_batches,
        p.overlap_experts,
        saves_outputs=not cfg.trains_indexers_only,
    )
    shortest = whole.shortest_equivalent()
    rows = schedule_rows(
        chosen_in(p, SchedulePart),
        p.pp,
        p.virtual_stages,
        shortest.num_micro_batches,
        overlap=overlaps_micro_batches(cfg.model, p),
    )
    stages = PipelineStages(*recipe_stages(cfg), columns_of(cfg.model.distinct_kinds))
    return StepSnapshots(shortest, stages, merges_equal_chunks=False).by_rank(rows)


def _activation_peak(snapshots: RankSnapshots, formula: ActivationMemory, table: ByteTable) -> ActivationPeak:
    """Return the snapshot of a rank with most bytes."""
    occurs = snapshots.occurrence[:, int(recomputes_comm(formula.recompute))] > 0
    at = int(np.argmax(np.where(occurs, snapshots.activations @ table.sum(axis=0), -np.inf)))
    by_part = dict(zip(PARTS, (table @ snapshots.activations[at]).astype(int).tolist(), strict=True))
    in_flight = {stage: int(snapshots.in_flight[at, stage]) for stage in snapshots.stages}
    return ActivationPeak(sum(by_part.values()), {part: size for part, size in by_part.items() if size}, in_flight)
