"""The most memory that each pipeline rank needs in a step: states, and the activations that a schedule has in flight.

Torch-free and cheap: the planner asks for thousands of mappings.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import pairwise

from moefold.config.action import Slot, SlotRow
from moefold.config.schedule_order import schedule_slots
from moefold.config.schedules import SCHEDULES
from moefold.config.schema import Config
from moefold.metrics.activation_memory import ActivationFormula
from moefold.metrics.kept_parts import CUDA, Kernels, Parts
from moefold.metrics.moments_away import moments_away
from moefold.metrics.pass_memory import Amount, PassFormula, Way, fullest_moment
from moefold.metrics.state_memory import StateBytes, StateFormula
from moefold.parallel.stage_plan import plan_stages

WAITS_FOR_SENDS = ("gpipe", "1f1b")
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


def memory_of_ranks(
    cfg: Config,
    *,
    recompute: Iterable[str] | None = None,
    kernels: Kernels = CUDA,
    imbalance: float = 1.0,
    states: tuple[StateBytes, ...] | None = None,
) -> tuple[RankMemory, ...]:
    """The memory of each pipeline rank.

    Args:
        cfg: a recipe that `check_config` passed.
        recompute: parts that run again; None takes those of the recipe.
        kernels: of the device.
        imbalance: rows of the fullest rank's experts over the mean of all ranks.
        states: those of `StateFormula`, for a caller that asks again with other parts.
    """
    states = StateFormula(cfg).worst if states is None else states
    peaks = activation_peaks(ActivationFormula(cfg, recompute, kernels, imbalance), cfg)
    found = []
    for rank, (peak, pipeline) in enumerate(zip(peaks, pipeline_buffers(cfg), strict=True)):
        moments = moments_away(cfg, rank)
        mine = replace(states[rank], optimizer=states[rank].optimizer - moments.away)
        update = max(0, moments.in_transit - peak.total - pipeline)
        found.append(RankMemory(rank, mine, peak, pipeline, update))
    return tuple(found)


def activation_peaks(formula: ActivationFormula, cfg: Config) -> tuple[ActivationPeak, ...]:
    """Walk through the order of work of every pipeline rank, and find the moment with most activations."""
    plan, p = plan_stages(cfg), cfg.parallel
    # Without a pipeline there is no schedule.
    splits = p.pp > 1 and SCHEDULES[p.schedule].splits_backward
    ways, overlaps = PassFormula(formula, splits=splits), cfg.parallel.overlap_experts
    passes = []
    for stage in plan.stages:
        left = formula.postponed(stage) if splits else Parts()
        # All schedules but the simplest keep what they hand on, results and gradients, until the step ends.
        num_neighbours = (stage.number > 0) + (stage.number + 1 < len(plan.stages))
        lets_go = cfg.parallel.schedule in WAITS_FOR_SENDS and not overlaps
        num_sent = 0 if lets_go or cfg.parallel.pp == 1 else num_neighbours
        sent = Parts(pipeline=num_sent * formula.hidden)
        peaks = formula.forward(stage), formula.backward(stage, splits=splits)
        both = (ways.forward(stage), ways.backward(stage)) if overlaps else ((), ())
        passes.append(_Passes(*peaks, formula.stage(stage), left, sent, both))
    return tuple(_peak(row, passes) for row in schedule_slots(cfg))


def pipeline_buffers(cfg: Config) -> tuple[int, ...]:
    """For each pipeline rank the buffers that torch's stages have for what they get.

    For each micro-batch a stage has one for its input and one for the gradient of its result, where these come from
    another rank; all at once, for the whole step.
    """
    plan, hidden = plan_stages(cfg), ActivationFormula(cfg).hidden
    totals = [0] * cfg.parallel.pp
    for before, after in pairwise(plan.stages):
        if before.pp_rank != after.pp_rank:
            totals[before.pp_rank] += cfg.num_micro_batches * hidden
            totals[after.pp_rank] += cfg.num_micro_batches * hidden
    return tuple(totals)


class _Passes:
    """What one micro-batch has in memory on one stage."""

    def __init__(
        self, forward: Parts, backward: Parts, kept: Parts, left: Parts, sent: Parts, ways: tuple[Way, Way]
    ) -> None:
        self.forward, self.backward, self.kept, self.left, self.sent = forward, backward, kept, left, Amount(sent)
        self.forward_bytes, self.backward_bytes = forward.total(), backward.total()
        self.kept_bytes, self.left_bytes = kept.total(), left.total()
        self.ways = ways
        """Forward and backward, where micro-batches go in pairs."""


class _Fullest:
    """The fullest moment of what begins together on a rank, beside other micro-batches."""

    def __init__(self, passes: list[_Passes]) -> None:
        self._passes = passes
        self._pairs: dict[tuple[int, int], tuple[Amount, Amount]] = {}

    def bytes_of(self, slot: Slot) -> int:
        """The total of `parts_of`, which is asked for often."""
        if len(slot) > 1:
            return sum(amount.size for amount in self._pair(slot))
        stage = self._passes[slot[0].stage]
        return {"F": stage.forward_bytes, "W": 0}.get(slot[0].kind, stage.backward_bytes)

    def parts_of(self, slot: Slot) -> Parts:
        """By part."""
        if len(slot) > 1:
            ahead, behind = self._pair(slot)
            return ahead.parts + behind.parts
        stage = self._passes[slot[0].stage]
        return {"F": stage.forward, "W": Parts()}.get(slot[0].kind, stage.backward)

    def _pair(self, slot: Slot) -> tuple[Amount, Amount]:
        ahead, behind = (action.stage for action in slot)
        if (ahead, behind) not in self._pairs:
            other = self._passes[behind]
            self._pairs[ahead, behind] = fullest_moment(self._passes[ahead].ways[0], other.ways[1], other.sent)
        return self._pairs[ahead, behind]


def _peak(row: SlotRow, passes: list[_Passes]) -> ActivationPeak:
    """Follow one rank: a forward pass keeps activations, the backward pass of inputs trades them for what is left."""
    now = most = best_at = 0
    fullest = _Fullest(passes)
    for i, slot in enumerate(row):
        # Those whose backward pass runs are counted in its moment.
        now -= sum(passes[action.stage].kept_bytes for action in slot if action.kind in "BI")
        full = now + fullest.bytes_of(slot)
        if full > most:
            most, best_at = full, i
        for action in slot:
            stage = passes[action.stage]
            if action.kind == "F":
                now += stage.kept_bytes
            elif action.kind == "W":
                now -= stage.left_bytes
            else:
                now += stage.sent.size + (stage.left_bytes if action.kind == "I" else 0)
    return _moment(row, passes, fullest.parts_of(row[best_at]), most, best_at)


def _moment(row: SlotRow, passes: list[_Passes], fullest: Parts, total: int, at: int) -> ActivationPeak:
    """What is in memory at one slot of a row."""
    done = Counter((action.stage, action.kind) for slot in row[:at] for action in slot)
    by_part = Counter(fullest)
    leaving = [action.stage for action in row[at] if action.kind in "BI"]
    in_flight = {}
    for number in {action.stage for slot in row for action in slot}:
        forward, whole, inputs, weights = (done[number, kind] for kind in "FBIW")
        stage, in_flight[number] = passes[number], forward - whole - inputs
        for count, parts in (
            (in_flight[number] - leaving.count(number), stage.kept),
            (inputs - weights, stage.left),
            (whole + inputs, stage.sent.parts),
        ):
            for part, size in parts.items():
                by_part[part] += count * size
    return ActivationPeak(total, {part: size for part, size in by_part.items() if size}, in_flight)
