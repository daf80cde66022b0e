"""Peak memory of each pipeline rank in a step: states plus the activations that a schedule has in flight.

Torch-free and cheap: the planner calls it for thousands of mappings.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import pairwise

from moefold.config.schema import Config
from moefold.cost.activation_memory import ActivationMemory
from moefold.cost.overlap_memory import OverlappedPassMemory, PassIntervals, SizedParts, overlapped_peak
from moefold.cost.saved_tensors import CUDA_KERNELS, BytesByPart, KernelProfile
from moefold.cost.stages import plan_stages
from moefold.cost.state_memory import StateMemory, optimizer_offload_memory
from moefold.cost.unit_memory import StateBytes
from moefold.topology.pipeline_action import Slot, SlotRow
from moefold.topology.schedule_tables import schedule_of, schedule_slots


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
    pipeline: int
    """Bytes of torch.distributed.pipelining's receive buffers: hidden states and gradients of all micro-batches at
    once."""
    optimizer_in_transit: int = 0
    """Offloaded moments in memory during the update, as far as they exceed the activations and buffers freed by
    then."""

    @property
    def total(self) -> int:
        """Peak bytes, without kernel workspaces."""
        states = self.states
        resting = states.weights + states.gathered + states.optimizer + states.buffers
        return (
            resting
            + max(states.gradients, states.gradient_sums)
            + self.activations.total
            + self.pipeline
            + self.optimizer_in_transit
        )


def compute_rank_memory(
    cfg: Config,
    *,
    recompute: Iterable[str] | None = None,
    kernels: KernelProfile = CUDA_KERNELS,
    imbalance: float = 1.0,
    states: tuple[StateBytes, ...] | None = None,
) -> tuple[RankMemory, ...]:
    """Return the peak memory of each pipeline rank.

    Args:
        cfg: a recipe that `check_config` passed.
        recompute: parts that are recomputed; None: those of the recipe.
        kernels: kernel profile of the device.
        imbalance: routed tokens of the busiest rank over the mean of all ranks.
        states: `StateMemory.max_by_pp_rank`, if the caller has it already.
    """
    states = StateMemory(cfg).max_by_pp_rank if states is None else states
    peaks = activation_peaks(ActivationMemory(cfg, recompute, kernels, imbalance), cfg)
    found = []
    for rank, (peak, pipeline) in enumerate(zip(peaks, pipeline_buffer_bytes(cfg), strict=True)):
        moments = optimizer_offload_memory(cfg, rank)
        resident = replace(states[rank], optimizer=states[rank].optimizer - moments.offloaded)
        update = max(0, moments.in_transit - peak.total - pipeline)
        found.append(RankMemory(rank, resident, peak, pipeline, update))
    return tuple(found)


def activation_peaks(activation_memory: ActivationMemory, cfg: Config) -> tuple[ActivationPeak, ...]:
    """Simulate the schedule of every pipeline rank and return its peak activation memory."""
    plan = plan_stages(cfg)
    p = cfg.parallel
    # Without a pipeline there is no schedule.
    splits = p.pp > 1 and schedule_of(cfg).splits_backward
    overlapped = OverlappedPassMemory(activation_memory, splits_backward=splits)
    overlaps = cfg.parallel.overlap_experts
    passes = []
    for stage in plan.stages:
        delayed = activation_memory.delayed_wgrad(stage) if splits else BytesByPart()
        num_neighbours = (stage.number > 0) + (stage.number + 1 < len(plan.stages))
        frees_sent = schedule_of(cfg).frees_sent_messages and not overlaps
        num_sent = 0 if frees_sent or cfg.parallel.pp == 1 else num_neighbours
        sent = BytesByPart(pipeline=num_sent * activation_memory.hidden_bytes)
        peaks = activation_memory.forward_peak(stage), activation_memory.backward_peak(stage, splits_backward=splits)
        intervals = (
            (overlapped.forward_intervals(stage), overlapped.backward_intervals(stage)) if overlaps else ((), ())
        )
        passes.append(_StagePasses(*peaks, activation_memory.stage_saved(stage), delayed, sent, intervals))
    return tuple(_rank_peak(row, passes) for row in schedule_slots(cfg))


def pipeline_buffer_bytes(cfg: Config) -> tuple[int, ...]:
    """Return the bytes of the receive buffers of each pipeline rank's stages.

    For each micro-batch a stage has one buffer for its input and one for the gradient of its output, if these come from
    another rank; torch allocates all of them for the whole step.
    """
    plan = plan_stages(cfg)
    hidden = ActivationMemory(cfg).hidden_bytes
    totals = [0] * cfg.parallel.pp
    for before, after in pairwise(plan.stages):
        if before.pp_rank != after.pp_rank:
            totals[before.pp_rank] += cfg.num_micro_batches * hidden
            totals[after.pp_rank] += cfg.num_micro_batches * hidden
    return tuple(totals)


class _StagePasses:
    """Memory of one micro-batch on one stage."""

    def __init__(
        self,
        forward_peak: BytesByPart,
        backward_peak: BytesByPart,
        saved: BytesByPart,
        delayed_wgrad: BytesByPart,
        sent: BytesByPart,
        intervals: tuple[PassIntervals, PassIntervals],
    ) -> None:
        self.forward_peak = forward_peak
        self.backward_peak = backward_peak
        self.saved = saved
        self.delayed_wgrad = delayed_wgrad
        self.sent = SizedParts(sent)
        self.forward_bytes = forward_peak.total()
        self.backward_bytes = backward_peak.total()
        self.saved_bytes = saved.total()
        self.delayed_wgrad_bytes = delayed_wgrad.total()
        self.intervals = intervals
        """Intervals of the forward and the backward pass, with overlapped schedules."""


class _SlotPeaks:
    """Cached memory peaks of the slots of a rank."""

    def __init__(self, passes: list[_StagePasses]) -> None:
        self._passes = passes
        self._pair_peaks: dict[tuple[int, int], tuple[SizedParts, SizedParts]] = {}

    def peak_bytes(self, slot: Slot) -> int:
        """Return the total of `peak_parts`, cached because it is needed for every slot."""
        if len(slot) > 1:
            return sum(amount.size for amount in self._pair_peak(slot))
        stage = self._passes[slot[0].stage]
        return {"F": stage.forward_bytes, "W": 0}.get(slot[0].kind, stage.backward_bytes)

    def peak_parts(self, slot: Slot) -> BytesByPart:
        """Return the peak of a slot by part."""
        if len(slot) > 1:
            forward, backward = self._pair_peak(slot)
            return forward.parts + backward.parts
        stage = self._passes[slot[0].stage]
        return {"F": stage.forward_peak, "W": BytesByPart()}.get(slot[0].kind, stage.backward_peak)

    def _pair_peak(self, slot: Slot) -> tuple[SizedParts, SizedParts]:
        forward, backward = (action.stage for action in slot)
        if (forward, backward) not in self._pair_peaks:
            backward_passes = self._passes[backward]
            self._pair_peaks[forward, backward] = overlapped_peak(
                self._passes[forward].intervals[0], backward_passes.intervals[1], backward_passes.sent
            )
        return self._pair_peaks[forward, backward]


def _rank_peak(row: SlotRow, passes: list[_StagePasses]) -> ActivationPeak:
    """Return the peak of one rank: F adds saved activations; I and B free them, and I adds delayed weight gradients."""
    current = peak = peak_slot = 0
    slot_peaks = _SlotPeaks(passes)
    for i, slot in enumerate(row):
        # A running backward pass includes its saved activations in its own peak.
        current -= sum(passes[action.stage].saved_bytes for action in slot if action.kind in "BI")
        candidate = current + slot_peaks.peak_bytes(slot)
        if candidate > peak:
            peak = candidate
            peak_slot = i
        for action in slot:
            stage = passes[action.stage]
            if action.kind == "F":
                current += stage.saved_bytes
            elif action.kind == "W":
                current -= stage.delayed_wgrad_bytes
            else:
                current += stage.sent.size + (stage.delayed_wgrad_bytes if action.kind == "I" else 0)
    return _peak_snapshot(row, passes, slot_peaks.peak_parts(row[peak_slot]), peak, peak_slot)


def _peak_snapshot(
    row: SlotRow, passes: list[_StagePasses], peak_parts: BytesByPart, total: int, slot_index: int
) -> ActivationPeak:
    """Return the activation memory at one slot of a row, by part."""
    done = Counter((action.stage, action.kind) for slot in row[:slot_index] for action in slot)
    by_part = Counter(peak_parts)
    leaving = [action.stage for action in row[slot_index] if action.kind in "BI"]
    in_flight = {}
    for number in {action.stage for slot in row for action in slot}:
        forward, backward, input_grads, weight_grads = (done[number, kind] for kind in "FBIW")
        stage = passes[number]
        in_flight[number] = forward - backward - input_grads
        for count, parts in (
            (in_flight[number] - leaving.count(number), stage.saved),
            (input_grads - weight_grads, stage.delayed_wgrad),
            (backward + input_grads, stage.sent.parts),
        ):
            for part, size in parts.items():
                by_part[part] += count * size
    return ActivationPeak(total, {part: size for part, size in by_part.items() if size}, in_flight)
