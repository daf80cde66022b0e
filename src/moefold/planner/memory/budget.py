"""Memory model: bytes of the fullest rank of a mapping. Tests compare the formulas with the runtime.

Weights, gradients, moments and activations follow `cost/unit_state_memory.py` and `cost/activation_memory.py`, in the
order of the schedule. They are linear in a few counts (`cost/peak_candidates.py`) and a few sizes (`states.py`,
`activations.py`), each computed once, so that a search may evaluate hundreds of thousands of mappings.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moefold.config.schema import Config
from moefold.cost.activation_columns import recomputes_comm
from moefold.cost.hardware import Device
from moefold.cost.memoised import all_arguments, memoised
from moefold.cost.memory_columns import Counts
from moefold.cost.peak_candidates import MemorySnapshots, PipelineStages, StepSchedule, StepSnapshots
from moefold.cost.saved_tensors import PARTS
from moefold.planner.cost_model.workload import TrainingWorkload
from moefold.planner.mapping import ParallelMapping
from moefold.planner.memory.activations import ActivationMemoryTable, MemoryStrategies, minimal_config
from moefold.planner.memory.states import STATE_PARTS, StateMemoryTable
from moefold.planner.model_spec import ModelSpec, layer_parameters
from moefold.planner.stage_splitter import RecipeStageSplitter, StageSplitter, placed_ranks, stages_by_rank
from moefold.topology.schedules import DEFAULT_SCHEDULE
from moefold.units import GIB

OVERHEAD_GIB = 3.0
"""CUDA context, buffers of NCCL and of the GEMM libraries, and fragmentation of the allocator."""
REPORTED_ACTIVATIONS = {"dispatch buffers": "dispatch", "logits": "logits", "pipeline": "pipeline"}
"""Parts of the activations that are reported separately. The others are "activations"."""
MEMORY_PARTS = (*STATE_PARTS, "activations", *REPORTED_ACTIVATIONS.values(), "workspace")
"""Parts of a `MemoryEstimate`. `gathered` are weights in the compute type. `optimizer` has the moments on the device,
and the excess of prefetched moments over the activations of the peak. `buffers` are of the router, RoPE and the
dispatcher. `dispatch` are routed tokens, `pipeline` hidden states and gradients between stages."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryEstimate:
    """Bytes of the fullest rank."""

    parts: dict[str, float]
    """Bytes by `MEMORY_PARTS`."""
    capacity: float

    @property
    def total(self) -> float:
        """Sum of all parts."""
        return sum(self.parts.values())

    @property
    def fits(self) -> bool:
        """True if the device has this much memory."""
        return self.total <= self.capacity


class MemoryModel:
    """Memory model of the mappings of one model.

    Args:
        cfg: the recipe. None: a recipe with only the model and the batch.
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
        self.split = split or RecipeStageSplitter(cfg, model_spec, as_megatron=workload.is_megatron)
        self.activation_memory = ActivationMemoryTable(model_spec, workload, cfg, on_cpu=device.name == "cpu")
        self.columns = self.activation_memory.columns
        self.state_memory = StateMemoryTable(model_spec, workload, cfg, self.activation_memory.kernel_profile)
        self._running_cache: dict[tuple[Hashable, ...], Counts] = {}
        self._overhead_bytes = 0.0 if device.name == "cpu" else OVERHEAD_GIB * GIB

    def workspace(self, mapping: ParallelMapping) -> float:
        """Return the bytes of `OVERHEAD_GIB`, and of one module's full gradients."""
        return self._overhead_bytes + (self._gradient_bytes(mapping) if mapping.world_size > 1 else 0.0)

    @memoised(lambda self, m: (m.tp, m.ep * m.etp))
    def _gradient_bytes(self, mapping: ParallelMapping) -> float:
        """Return the bytes of the full gradients of the largest FSDP2 module, and of the buffer to reduce them.

        FSDP2 copies the gradients into one buffer of the reduced type (`foreach_reduce`), whatever is sharded.
        Megatron-Core adds and reduces gradients in place, and its published rows had headroom. The temporary tensors
        that compute the gradients are activations.
        """
        w = self.workload
        if w.is_megatron:
            return 0.0
        sizes = [layer_parameters(layer) for layer in self.model_spec.kinds]
        largest = max(max(dense / mapping.tp, experts / (mapping.ep * mapping.etp)) for dense, experts in sizes)
        return largest * (w.value_bytes + max(w.reduce_bytes, w.value_bytes))

    def estimate(self, mapping: ParallelMapping) -> MemoryEstimate:
        """Return the bytes of the fullest rank, by part."""
        snapshots = self.snapshots(mapping)
        states = self.state_memory.bytes_by_part(mapping)
        saved = self.activation_memory.bytes_by_part(mapping)
        # During the update there are no activations, and offloaded moments are prefetched.
        activations = snapshots.activations @ saved.sum(axis=0)
        prefetched = self.state_memory.update_bytes(mapping, snapshots.states)
        totals = snapshots.states @ states.sum(axis=0) + np.maximum(activations, prefetched)
        # Where the update is the peak, the activations of the fullest snapshot before it are reported.
        at = int(np.lexsort((activations, totals))[-1])
        parts = dict.fromkeys(MEMORY_PARTS, 0.0)
        parts |= dict(zip(STATE_PARTS, (states @ snapshots.states[at]).tolist(), strict=True))
        for part, size in zip(PARTS, (saved @ snapshots.activations[at]).tolist(), strict=True):
            parts[REPORTED_ACTIVATIONS.get(part, "activations")] += size
        parts["optimizer"] += max(0.0, float(prefetched[at] - activations[at]))
        return MemoryEstimate(parts=parts | {"workspace": self.workspace(mapping)}, capacity=self.device.memory_bytes)

    def totals(
        self,
        mapping: ParallelMapping,
        strategies: MemoryStrategies,
        which: Sequence[int] | NDArray[np.intp] | None = None,
    ) -> NDArray[np.float64]:
        """Return the bytes of the fullest rank with some of the memory strategies, not the mapping's own, [which]."""
        snapshots = self._all_snapshots(mapping)
        wanted = strategies if which is None else MemoryStrategies(strategies[i] for i in which)
        activations = snapshots.activations @ self.activation_memory.total_bytes(mapping, wanted).T
        if mapping.overlap:
            activations[snapshots.occurrence[:, wanted.recomputes_comm] == 0] = -np.inf
        states = snapshots.states @ self.state_memory.total_bytes(mapping) + self.workspace(mapping)
        # During the update there are no activations.
        update = (states + self.state_memory.update_bytes(mapping, snapshots.states)).max()
        found: NDArray[np.float64] = (states[:, None] + activations).max(axis=0).clip(min=update)
        return found

    def snapshots(self, mapping: ParallelMapping) -> MemorySnapshots:
        """Return the snapshots of a step that may be the memory peak."""
        snapshots = self._all_snapshots(mapping)
        if not mapping.overlap:
            return snapshots
        at = snapshots.occurrence[:, int(recomputes_comm(mapping.recompute))] > 0
        return MemorySnapshots(snapshots.states[at], snapshots.activations[at], snapshots.occurrence[at])

    def peak_candidates(self, mapping: ParallelMapping) -> MemorySnapshots:
        """Return three of the snapshots, or lower bounds of them, at a fraction of the cost."""
        return self._all_snapshots(mapping, finds_all=False)

    def _all_snapshots(self, mapping: ParallelMapping, *, finds_all: bool = True) -> MemorySnapshots:
        """Return the snapshots with and without recomputed all-to-alls."""
        schedule = mapping.schedule if mapping.pp > 1 else DEFAULT_SCHEDULE
        n = mapping.num_micro_batches(self.workload.global_batch_size)
        whole = StepSchedule(schedule, mapping.pp, mapping.vpp, n, mapping.overlap)
        return self._snapshots_of(whole.shortest_equivalent(finds_all=finds_all), finds_all)

    @memoised(all_arguments)
    def _snapshots_of(self, schedule: StepSchedule, finds_all: bool) -> MemorySnapshots:
        stages = self._stages(placed_ranks(schedule.schedule, schedule.pp, schedule.vpp))
        found = StepSnapshots(schedule, stages, finds_all=finds_all, running_cache=self._running_cache)
        return found.candidates() if finds_all else found.few_candidates()

    @memoised(all_arguments)
    def _stages(self, ranks: tuple[int, ...]) -> PipelineStages:
        return PipelineStages(self.split(ranks), stages_by_rank(ranks), self.columns)


RESERVE_FRACTION = 0.05
"""Share of the device's memory that a planned mapping leaves free: for fragmentation of the allocator, and for errors
of the formulas. `OVERHEAD_GIB` (context, NCCL, libraries) is counted separately."""


def default_reserve_gib(device: Device) -> float:
    """Return the memory in GiB that `moefold plan` and `parallel = "auto"` leave free on a device by default."""
    return RESERVE_FRACTION * device.memory_gib
