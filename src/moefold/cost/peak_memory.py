"""The most memory that each pipeline rank needs in a step: states, and the activations that a schedule has in flight.

Torch-free and cheap: the planner asks for thousands of mappings.
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
from moefold.cost.state_memory import StateBytes, StateMemory, optimizer_offload_memory
from moefold.topology.pipeline_action import Slot, SlotRow
from moefold.topology.schedule_tables import SCHEDULES, schedule_slots

BLOCKING_SENDS = ("gpipe", "1f1b")
"""Schedules of torch that let go of what they have sent before the step ends."""


@dataclass(frozen=True, slots=True)
class ActivationPeak:
    """The moment of a step at which a pipeline rank has most activations."""

    total: int
    by_part: dict[str, int]
    in_flight: dict[int, int]
    """Micro-batches of each stage of the rank that are in flight at that moment."""


@dataclass(frozen=True, slots=True)
class RankMemory:
    """The memory of one pipeline rank, of the data-parallel member that has most."""

    pp_rank: int
    states: StateBytes
    """Without the moments that `train.offload_optimizer` has outside of memory."""
    activations: ActivationPeak
    pipeline: int
    """Buffers of torch.distributed.pipelining: hidden states and gradients of every micro-batch, all at once."""
    update: int = 0
    """Moments that the update brings back, beyond the room of activations and buffers, which are gone by then."""

    @property
    def total(self) -> int:
        """Their sum: the most that can be needed at once. Kernels' workspaces come on top."""
        states = self.states
        resting = states.weights + states.gathered + states.optimizer + states.buffers
        return (
            resting + max(states.gradients, states.gradient_sums) + self.activations.total + self.pipeline + self.update
        )


def compute_rank_memory(
    cfg: Config,
    *,
    recompute: Iterable[str] | None = None,
    kernels: KernelProfile = CUDA_KERNELS,
    imbalance: float = 1.0,
    states: tuple[StateBytes, ...] | None = None,
) -> tuple[RankMemory, ...]:
    """The memory of each pipeline rank.

    Args:
        cfg: a recipe that `check_config` passed.
        recompute: parts that run again; None takes those of the recipe.
        kernels: of the device.
        imbalance: rows of the fullest rank's experts over the mean of all ranks.
        states: those of `StateMemory`, for a caller that asks again with other parts.
    """
    states = StateMemory(cfg).max_by_pp_rank if states is None else states
    peaks = activation_peaks(ActivationMemory(cfg, recompute, kernels, imbalance), cfg)
    found = []
    for rank, (peak, pipeline) in enumerate(zip(peaks, pipeline_buffer_bytes(cfg), strict=True)):
        moments = optimizer_offload_memory(cfg, rank)
        mine = replace(states[rank], optimizer=states[rank].optimizer - moments.offloaded)
        update = max(0, moments.in_transit - peak.total - pipeline)
        found.append(RankMemory(rank, mine, peak, pipeline, update))
    return tuple(found)


def activation_peaks(activation_memory: ActivationMemory, cfg: Config) -> tuple[ActivationPeak, ...]:
    """Walk through the order of work of every pipeline rank, and find the moment with most activations."""
    plan, p = plan_stages(cfg), cfg.parallel
    # Without a pipeline there is no schedule.
    splits = p.pp > 1 and SCHEDULES[p.schedule].splits_backward
    ways, overlaps = OverlappedPassMemory(activation_memory, splits_backward=splits), cfg.parallel.overlap_experts
    passes = []
    for stage in plan.stages:
        left = activation_memory.delayed_wgrad(stage) if splits else BytesByPart()
        # All schedules but the simplest keep what they hand on, results and gradients, until the step ends.
        num_neighbours = (stage.number > 0) + (stage.number + 1 < len(plan.stages))
        lets_go = cfg.parallel.schedule in BLOCKING_SENDS and not overlaps
        num_sent = 0 if lets_go or cfg.parallel.pp == 1 else num_neighbours
        sent = BytesByPart(pipeline=num_sent * activation_memory.hidden_bytes)
        peaks = activation_memory.forward_peak(stage), activation_memory.backward_peak(stage, splits_backward=splits)
        both = (ways.forward_intervals(stage), ways.backward_intervals(stage)) if overlaps else ((), ())
        passes.append(_StagePasses(*peaks, activation_memory.stage_saved(stage), left, sent, both))
    return tuple(_rank_peak(row, passes) for row in schedule_slots(cfg))


def pipeline_buffer_bytes(cfg: Config) -> tuple[int, ...]:
    """For each pipeline rank the buffers that torch's stages have for what they get.

    For each micro-batch a stage has one for its input and one for the gradient of its result, where these come from
    another rank; all at once, for the whole step.
    """
    plan, hidden = plan_stages(cfg), ActivationMemory(cfg).hidden_bytes
    totals = [0] * cfg.parallel.pp
    for before, after in pairwise(plan.stages):
        if before.pp_rank != after.pp_rank:
            totals[before.pp_rank] += cfg.num_micro_batches * hidden
            totals[after.pp_rank] += cfg.num_micro_batches * hidden
    return tuple(totals)


class _StagePasses:
    """What one micro-batch has in memory on one stage."""

    def __init__(
        self,
        forward_peak: BytesByPart,
        backward_peak: BytesByPart,
        saved: BytesByPart,
        delayed_wgrad: BytesByPart,
        sent: BytesByPart,
        intervals: tuple[PassIntervals, PassIntervals],
    ) -> None:
        self.forward_peak, self.backward_peak, self.saved, self.delayed_wgrad, self.sent = (
            forward_peak,
            backward_peak,
            saved,
            delayed_wgrad,
            SizedParts(sent),
        )
        self.forward_bytes, self.backward_bytes = forward_peak.total(), backward_peak.total()
        self.saved_bytes, self.delayed_wgrad_bytes = saved.total(), delayed_wgrad.total()
        self.intervals = intervals
        """Forward and backward, where micro-batches go in pairs."""


class _SlotPeaks:
    """The fullest moment of what begins together on a rank, beside other micro-batches."""

    def __init__(self, passes: list[_StagePasses]) -> None:
        self._passes = passes
        self._pair_peaks: dict[tuple[int, int], tuple[SizedParts, SizedParts]] = {}

    def peak_bytes(self, slot: Slot) -> int:
        """The total of `peak_parts`, which is asked for often."""
        if len(slot) > 1:
            return sum(amount.size for amount in self._pair_peak(slot))
        stage = self._passes[slot[0].stage]
        return {"F": stage.forward_bytes, "W": 0}.get(slot[0].kind, stage.backward_bytes)

    def peak_parts(self, slot: Slot) -> BytesByPart:
        """By part."""
        if len(slot) > 1:
            ahead, behind = self._pair_peak(slot)
            return ahead.parts + behind.parts
        stage = self._passes[slot[0].stage]
        return {"F": stage.forward_peak, "W": BytesByPart()}.get(slot[0].kind, stage.backward_peak)

    def _pair_peak(self, slot: Slot) -> tuple[SizedParts, SizedParts]:
        ahead, behind = (action.stage for action in slot)
        if (ahead, behind) not in self._pair_peaks:
            other = self._passes[behind]
            self._pair_peaks[ahead, behind] = overlapped_peak(
                self._passes[ahead].intervals[0], other.intervals[1], other.sent
            )
        return self._pair_peaks[ahead, behind]


def _rank_peak(row: SlotRow, passes: list[_StagePasses]) -> ActivationPeak:
    """Follow one rank: a forward pass keeps activations, the backward pass of inputs trades them for what is left."""
    now = most = best_at = 0
    fullest = _SlotPeaks(passes)
    for i, slot in enumerate(row):
        # Those whose backward pass runs are counted in its moment.
        now -= sum(passes[action.stage].saved_bytes for action in slot if action.kind in "BI")
        full = now + fullest.peak_bytes(slot)
        if full > most:
            most, best_at = full, i
        for action in slot:
            stage = passes[action.stage]
            if action.kind == "F":
                now += stage.saved_bytes
            elif action.kind == "W":
                now -= stage.delayed_wgrad_bytes
            else:
                now += stage.sent.size + (stage.delayed_wgrad_bytes if action.kind == "I" else 0)
    return _peak_snapshot(row, passes, fullest.peak_parts(row[best_at]), most, best_at)


def _peak_snapshot(
    row: SlotRow, passes: list[_StagePasses], peak_parts: BytesByPart, total: int, slot_index: int
) -> ActivationPeak:
    """What is in memory at one slot of a row."""
    done = Counter((action.stage, action.kind) for slot in row[:slot_index] for action in slot)
    by_part = Counter(peak_parts)
    leaving = [action.stage for action in row[slot_index] if action.kind in "BI"]
    in_flight = {}
    for number in {action.stage for slot in row for action in slot}:
        forward, whole, inputs, weights = (done[number, kind] for kind in "FBIW")
        stage, in_flight[number] = passes[number], forward - whole - inputs
        for count, parts in (
            (in_flight[number] - leaving.count(number), stage.saved),
            (inputs - weights, stage.delayed_wgrad),
            (whole + inputs, stage.sent.parts),
        ):
            for part, size in parts.items():
                by_part[part] += count * size
    return ActivationPeak(total, {part: size for part, size in by_part.items() if size}, in_flight)
