"""The memory of the fullest rank of a mapping, by the formulas that the runtime is held to. Torch-free.

Weights, gradients, moments and activations are those of `cost/state_memory.py` and `cost/activation_memory.py`,
in the order of the schedule. They are linear in a few counts (`snapshots.py`) and a few prices (`held_states.py`,
`kept.py`), each found once, so that a search may ask for the memory of hundreds of thousands of mappings.

Memory that the planner leaves free on each device, beyond what its formulas count. Torch-free.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moefold.config.schema import Config
from moefold.cost.hardware import GIB, Device
from moefold.cost.overlap_memory import recomputes_comm
from moefold.planner.cost_model.workload import TrainingWorkload
from moefold.planner.mapping import ParallelMapping
from moefold.planner.memory.activations import (
    ACTIVATION_PARTS,
    ActivationMemoryTable,
    minimal_config,
    routed_tokens_per_token,
)
from moefold.planner.memory.columns import MemoryColumns, build_columns
from moefold.planner.memory.snapshots import MemorySnapshots, ScheduleSpec, find_peak_candidates, find_snapshots
from moefold.planner.memory.states import STATE_PARTS, OptimizerPrefetch, StateMemoryTable
from moefold.planner.model_spec import ModelSpec, layer_parameters
from moefold.planner.stages import ModelChunk, StageSplitter, chunks_of_rank, make_stage_splitter

OVERHEAD_GIB = 3.0
"""CUDA context, buffers of NCCL and of the libraries of products, and what the allocator cannot fill."""
EXPERT_BACKWARD_BUFFERS = 4
"""Rows of the inner width that the backward pass of an expert has at once for each of its rows, beside what was kept or
computed again: the gradient of the hidden values, the hidden values, and the gradients of gate and up."""
MEMORY_PARTS = (*STATE_PARTS, *ACTIVATION_PARTS, "workspace")
"""Of `MemoryEstimate`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryEstimate:
    """Bytes of the fullest rank, by part."""

    weights: float
    """Master weights: this rank's shards."""
    gathered: float
    """The weights in the compute type, as much as is there at once."""
    gradients: float
    optimizer: float
    """Moments, and those that an update brings back beyond the room that activations leave."""
    buffers: float
    """Biases and counts of the router, and the rotation."""
    activations: float
    dispatch: float
    """Rows under way to and from experts."""
    logits: float
    pipeline: float
    """Hidden states that were sent or are awaited."""
    workspace: float
    capacity: float

    @property
    def total(self) -> float:
        """All parts."""
        return float(sum(getattr(self, part) for part in MEMORY_PARTS))

    @property
    def fits(self) -> bool:
        """Whether the device has so much."""
        return self.total <= self.capacity


FindSnapshots = Callable[[ScheduleSpec, Sequence[ModelChunk], Sequence[Sequence[int]], MemoryColumns], MemorySnapshots]


class MemoryModel:
    """The memory of the mappings of one model.

    Args:
        model_spec: the model.
        workload: the batch and the routing.
        device: whose memory it is.
        cfg: the recipe; None: one with nothing but the model and the batch.
        split: which stage holds what.
    """

    def __init__(
        self,
        model_spec: ModelSpec,
        workload: TrainingWorkload,
        device: Device,
        cfg: Config | None = None,
        split: StageSplitter | None = None,
    ) -> None:
        cfg = cfg or minimal_config(model_spec, workload)
        self.model_spec = model_spec
        self.workload = workload
        self.device = device
        self.split = split or make_stage_splitter(model_spec, workload.seq_len)
        self.columns = build_columns(model_spec)
        self.state_memory = StateMemoryTable(model_spec, workload, cfg, self.columns)
        self.activation_memory = ActivationMemoryTable(
            model_spec, workload, cfg, self.columns, on_cpu=device.name == "cpu"
        )
        self._snapshots: dict[ScheduleSpec, MemorySnapshots] = {}
        self._peak_candidates: dict[ScheduleSpec, MemorySnapshots] = {}
        self.optimizer_prefetch = OptimizerPrefetch(self.state_memory)
        self._overhead_bytes = 0.0 if device.name == "cpu" else OVERHEAD_GIB * GIB
        self._backward_bytes_cache: dict[tuple[int, ...], float] = {}

    def workspace(self, mapping: ParallelMapping) -> float:
        """Bytes of `OVERHEAD_GIB`, and of what the backward pass of one layer makes and forgets."""
        key = (mapping.tp, mapping.cp, mapping.mbs, mapping.ep, mapping.etp)
        if key not in self._backward_bytes_cache:
            self._backward_bytes_cache[key] = self._backward_bytes(mapping)
        return self._overhead_bytes + (self._backward_bytes_cache[key] if mapping.world_size > 1 else 0.0)

    def _backward_bytes(self, mapping: ParallelMapping) -> float:
        """Bytes of the fullest module of FSDP2: its whole gradients, and what makes or what reduces them.

        Experts make them with `EXPERT_BACKWARD_BUFFERS` of their inner width for each row (`SortedExperts.backward`; on a CPU
        these are made in place). FSDP2 copies them together into one buffer of the reduced type (`foreach_reduce`),
        whatever is sharded. Megatron-Core adds and reduces gradients in place, and its rows that were fitted had room.
        """
        w = self.workload
        found = 0.0
        if w.is_megatron:
            return 0.0
        tokens = mapping.mbs * w.seq_len / (mapping.cp * mapping.tp)
        working = 0 if self.device.name == "cpu" else EXPERT_BACKWARD_BUFFERS * w.value_bytes
        for kind, layer in enumerate(self.model_spec.kinds):
            dense, experts = layer_parameters(self.model_spec, kind)
            copies = routed_tokens_per_token(layer.feed_forward, w)
            rows = tokens * copies * layer.feed_forward.width if layer.feed_forward else 0.0
            for size, work in ((dense / mapping.tp, 0.0), (experts / (mapping.ep * mapping.etp), rows * working)):
                found = max(found, size * w.value_bytes + max(size * max(w.reduce_bytes, w.value_bytes), work))
        return found

    def estimate(self, mapping: ParallelMapping) -> MemoryEstimate:
        """All of it, by part."""
        moments = self.snapshots(mapping)
        states = self.state_memory.bytes_by_part(mapping, accumulates_gradients=self._num_micro_batches(mapping) > 1)
        kept = self.activation_memory.bytes_by_part(mapping)
        # At the update activations are gone, and moments that live elsewhere come back.
        active = moments.activations @ kept.sum(axis=0)
        back = self.optimizer_prefetch.extra_bytes(mapping, moments.states)
        at = int(np.argmax(moments.states @ states.sum(axis=0) + np.maximum(active, back)))
        parts = dict(zip(STATE_PARTS, (states @ moments.states[at]).tolist(), strict=True))
        parts |= dict(zip(ACTIVATION_PARTS, (kept @ moments.activations[at]).tolist(), strict=True))
        parts["optimizer"] += max(0.0, float(back[at] - active[at]))
        return MemoryEstimate(**parts, workspace=self.workspace(mapping), capacity=self.device.memory_bytes)

    def memory_budget(
        self, mapping: ParallelMapping, saved: NDArray[np.float64], recomputes_comm: NDArray[np.intp]
    ) -> "MemoryBudget":
        """What the savers of a pipeline are asked about.

        Args:
            mapping: the mapping; what is sharded, where the moments live, and what saves activations does not count.
            kept: `ActivationMemoryTable.totals` of savers.
            recomputes_comm: `MemoryStrategies.pauses` of them.
        """
        moments = self._all_snapshots(mapping)
        return MemoryBudget(
            self, moments, saved, moments.occurrence[:, recomputes_comm] > 0 if mapping.overlap else None
        )

    def persistent_bytes(self, mapping: ParallelMapping) -> NDArray[np.float64]:
        """Bytes of each state column under a mapping."""
        return self.state_memory.total_bytes(mapping, accumulates_gradients=self._num_micro_batches(mapping) > 1)

    def snapshots(self, mapping: ParallelMapping) -> MemorySnapshots:
        """What may be in memory at once."""
        moments = self._all_snapshots(mapping)
        if not mapping.overlap:
            return moments
        at = moments.occurrence[:, int(recomputes_comm(mapping.recompute))] > 0
        return MemorySnapshots(
            moments.states[at], moments.activations[at], moments.occurrence[at], moments.messages_per_micro_batch[at]
        )

    def _all_snapshots(self, mapping: ParallelMapping) -> MemorySnapshots:
        """The same whatever runs again."""
        return self._find_cached(self._schedule_spec(mapping), self._snapshots, find_snapshots)

    def peak_candidates(self, mapping: ParallelMapping) -> MemorySnapshots:
        """Two of those moments, or some that others outdo: found at a fraction of the cost."""
        return self._find_cached(self._schedule_spec(mapping), self._peak_candidates, find_peak_candidates)

    def _find_cached(
        self, schedule_spec: ScheduleSpec, cache: dict[ScheduleSpec, MemorySnapshots], find: FindSnapshots
    ) -> MemorySnapshots:
        """The moments of an order, found once for all that differ in the length of the steady phase alone."""
        if schedule_spec not in cache:
            shortest = schedule_spec.shortest_equivalent
            if shortest not in cache:
                cache[shortest] = find(shortest, *self._stage_chunks(schedule_spec), self.columns)
            further = schedule_spec.num_micro_batches - shortest.num_micro_batches
            cache[schedule_spec] = (
                cache[shortest].with_more_micro_batches(further, self.columns) if further else cache[shortest]
            )
        return cache[schedule_spec]

    def _schedule_spec(self, mapping: ParallelMapping) -> ScheduleSpec:
        schedule = mapping.schedule if mapping.pp > 1 else "1f1b"
        return ScheduleSpec(
            schedule,
            mapping.pp,
            mapping.vpp,
            self._num_micro_batches(mapping),
            mapping.overlap,
            not self.workload.is_megatron,
        )

    def _stage_chunks(self, schedule_spec: ScheduleSpec) -> tuple[tuple[ModelChunk, ...], tuple[tuple[int, ...], ...]]:
        chunks = self.split(schedule_spec.pp * schedule_spec.vpp)
        return chunks, chunks_of_rank(chunks, schedule_spec.schedule, schedule_spec.pp, schedule_spec.vpp)

    def _num_micro_batches(self, mapping: ParallelMapping) -> int:
        return mapping.num_micro_batches(self.workload.global_batch_size)


class MemoryBudget:
    """The memory of one pipeline, before it is said what is sharded and what saves activations.

    Args:
        memory_model: whose mapping it is.
        snapshots: of the pipeline.
        kept: bytes of each column of activations with each saver, [savers, columns].
        occurs: which moments there are with which savers, [moments, savers]; None: all with all.
    """

    def __init__(
        self,
        memory_model: MemoryModel,
        snapshots: MemorySnapshots,
        saved: NDArray[np.float64],
        occurs: NDArray[np.bool_] | None = None,
    ) -> None:
        self._memory_model = memory_model
        self._snapshots = snapshots
        self._saved = saved
        self._occurs = occurs

    def activations(self, indices: NDArray[np.intp] | slice = slice(None)) -> NDArray[np.float64]:
        """Bytes of activations at each moment with some of the savers, [moments, savers]; -inf where there is none."""
        found: NDArray[np.float64] = self._snapshots.activations @ self._saved[indices].T
        if self._occurs is not None:
            found[~self._occurs[:, indices]] = -np.inf
        return found

    def totals(self, mapping: ParallelMapping, activations: NDArray[np.float64]) -> NDArray[np.float64]:
        """Bytes of the fullest rank, [savers].

        Args:
            mapping: the mapping, whatever saves its activations.
            activations: those of some savers, [moments, savers].
        """
        memory = self._memory_model
        held = self._snapshots.states
        states = held @ memory.persistent_bytes(mapping) + memory.workspace(mapping)
        least: float = (states + memory.optimizer_prefetch.extra_bytes(mapping, held)).max()
        found: NDArray[np.float64] = (states[:, None] + activations).max(axis=0).clip(min=least)
        return found


RESERVE_FRACTION = 0.05
"""Share of the device's memory that a planned mapping leaves free: for fragmentation of the allocator and for what the
formulas have too little. The constants of `plan.memory` (context, NCCL, libraries) are counted separately."""


def default_reserve_gib(device: Device) -> float:
    """Return the memory that `moefold plan` and `parallel = "auto"` leave free on a device by default."""
    return RESERVE_FRACTION * device.memory_gib
