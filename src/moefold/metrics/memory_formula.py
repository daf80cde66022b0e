"""The most memory that each pipeline rank needs in a step: states, and the activations that a schedule has in flight.

Torch-free and cheap: the planner asks for thousands of mappings.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

from moefold.config.schedule_file import Row
from moefold.config.schedule_order import schedule_rows
from moefold.config.schedules import SCHEDULES
from moefold.config.schema import Config
from moefold.metrics.activation_memory import CUDA, ActivationFormula, Kernels, Parts
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
    activations: ActivationPeak
    pipeline: int
    """Buffers of torch.distributed.pipelining: hidden states and gradients of every micro-batch, all at once."""

    @property
    def total(self) -> int:
        """Their sum: the most that can be needed at once. Kernels' workspaces come on top."""
        states = self.states
        resting = states.weights + states.gathered + states.optimizer + states.buffers
        return resting + max(states.gradients, states.gradient_sums) + self.activations.total + self.pipeline


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
    return tuple(
        RankMemory(rank, states[rank], peak, pipeline)
        for rank, (peak, pipeline) in enumerate(zip(peaks, pipeline_buffers(cfg), strict=True))
    )


def activation_peaks(formula: ActivationFormula, cfg: Config) -> tuple[ActivationPeak, ...]:
    """Walk through the order of work of every pipeline rank, and find the moment with most activations."""
    plan, splits = plan_stages(cfg), SCHEDULES[cfg.parallel.schedule].splits_backward
    passes = []
    for stage in plan.stages:
        left = formula.postponed(stage) if splits else Parts()
        # All schedules but the simplest keep what they hand on, results and gradients, until the step ends.
        num_neighbours = (stage.number > 0) + (stage.number + 1 < len(plan.stages))
        num_sent = 0 if cfg.parallel.schedule in WAITS_FOR_SENDS or cfg.parallel.pp == 1 else num_neighbours
        sent = Parts(pipeline=num_sent * formula.hidden)
        peaks = formula.forward(stage), formula.backward(stage, splits=splits)
        passes.append(_Passes(*peaks, formula.stage(stage), left, sent))
    return tuple(_peak(row, passes) for row in schedule_rows(cfg).rows)


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

    def __init__(self, forward: Parts, backward: Parts, kept: Parts, left: Parts, sent: Parts) -> None:
        self.forward, self.backward, self.kept, self.left, self.sent = forward, backward, kept, left, sent
        self.forward_bytes, self.backward_bytes = forward.total(), backward.total()
        self.kept_bytes, self.left_bytes = kept.total(), left.total()
        self.sent_bytes = sent.total()


def _peak(row: Row, passes: list[_Passes]) -> ActivationPeak:
    """Follow one rank: a forward pass keeps activations, the backward pass of inputs trades them for what is left."""
    now = most = best_at = 0
    for i, action in enumerate(row):
        stage = passes[action.stage]
        if action.kind == "F":
            if now + stage.forward_bytes > most:
                most, best_at = now + stage.forward_bytes, i
            now += stage.kept_bytes
        elif action.kind == "W":
            now -= stage.left_bytes
        else:
            now -= stage.kept_bytes
            if now + stage.backward_bytes > most:
                most, best_at = now + stage.backward_bytes, i
            now += stage.sent_bytes + (stage.left_bytes if action.kind == "I" else 0)
    return _moment(row, passes, most, best_at)


def _moment(row: Row, passes: list[_Passes], total: int, at: int) -> ActivationPeak:
    """What is in memory at one action of a row."""
    done = Counter((action.stage, action.kind) for action in row[:at])
    running = passes[row[at].stage]
    by_part = Counter(running.forward if row[at].kind == "F" else running.backward)
    in_flight = {}
    for number in {action.stage for action in row}:
        forward, whole, inputs, weights = (done[number, kind] for kind in "FBIW")
        stage, in_flight[number] = passes[number], forward - whole - inputs
        # The one whose backward pass runs is counted above.
        is_leaving = row[at].stage == number and row[at].kind != "F"
        for count, parts in (
            (in_flight[number] - is_leaving, stage.kept),
            (inputs - weights, stage.left),
            (whole + inputs, stage.sent),
        ):
            for part, size in parts.items():
                by_part[part] += count * size
    return ActivationPeak(total, {part: size for part, size in by_part.items() if size}, in_flight)
