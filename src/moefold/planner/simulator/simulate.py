"""Discrete-event simulation of a step: a pipeline schedule over stages, streams and links.

Every pipeline rank has two streams, for compute and for the collectives inside a stage (tp, cp, ep, etp), and a link to
each rank that it sends to. A rank runs the slots of its row in order. An action is a chain of segments that run one
after another, each on one stream. A single action in a slot has both streams. Two actions that overlap begin when the
inputs of both are there, and share the streams: first come, first served, the backward pass first in a tie. Messages
are sent over the link after the slot has ended and when the link is free. The receiver need not be ready.

The ranks of a stage are assumed to run at the same speed: one rank stands for all of them. Slots contain one action, or
a forward and a backward pass of two micro-batches, in the runtime's order (`topology/schedules.py`).
"""

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from moefold.config.base.part import Part
from moefold.config.base.pipeline_actions import Action, ActionResult, SlotRow, execute_order, find_deadlock
from moefold.cost.memory_columns import ModelChunk, chunk_of
from moefold.planner.cost_model.block import CostItem
from moefold.planner.cost_model.step import CostModel
from moefold.planner.mapping import ParallelMapping
from moefold.planner.model_spec import ModelSpec
from moefold.planner.simulator.timeline import COMMUNICATION, COMPUTE, SEND, Event, Timeline
from moefold.planner.stage_splitter import placed_ranks
from moefold.topology.pipeline_layout import StagePlan
from moefold.topology.schedules import schedule_rows

Segments = tuple[CostItem, ...]
"""A chain of timed operations. Collectives run on the stream of communication."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StageSegments:
    """Segments of one stage for one micro-batch."""

    forward: Segments
    backward: Segments
    """The whole backward pass, for schedules that do not split it."""
    input_gradient: Segments
    weight_gradient: Segments
    p2p_s: float = 0.0
    """Seconds of sending hidden states to the next stage, if that is on another rank, or their gradients back."""

    def segments(self, kind: str) -> Segments:
        """Return the segments of an action kind."""
        chains = {"F": self.forward, "B": self.backward, "I": self.input_gradient, "W": self.weight_gradient}
        return chains[kind]


@dataclass(frozen=True, slots=True)
class Noise:
    """Stragglers and jitter, which slow down compute. Collectives and messages keep their duration."""

    slowdown_by_rank: Mapping[int, float] = field(default_factory=dict)
    """Compute slowdown factor by pipeline rank."""
    jitter: float = 0.0
    """Standard deviation of the logarithm of each action's time. The median is unchanged."""
    seed: int = 0

    def slowdown(self, rank: int, action: Action) -> float:
        """Return the slowdown factor of an action, which does not depend on the order of calls."""
        times = self.slowdown_by_rank.get(rank, 1.0)
        if self.jitter == 0.0:
            return times
        return times * math.exp(self.jitter * random.Random(f"{self.seed}/{rank}/{action}").gauss(0.0, 1.0))


@dataclass(frozen=True, slots=True)
class StepTail:
    """End of a step, after the last backward pass of a rank."""

    gradients_s: float = 0.0
    """Seconds of exposed data-parallel gradient reductions."""
    optimizer_s: float = 0.0
    """Seconds of the update, which begins on all ranks at once: it needs the norm of all gradients."""


def simulate(
    rows: Sequence[SlotRow],
    stages: Sequence[StageSegments],
    *,
    overlap: bool = False,
    noise: Noise | None = None,
    tail: StepTail | None = None,
    stages_by_micro_batch: Sequence[Sequence[StageSegments]] = (),
) -> Timeline:
    """Simulate a step.

    Args:
        rows: the slots of every pipeline rank, of `schedule_rows`.
        stages: segments of the stages, in model order.
        overlap: whether the two actions of a slot run concurrently instead of one after the other.
        noise: stragglers and jitter. None: an ideal machine.
        tail: the end of the step. None leaves it out.
        stages_by_micro_batch: like `stages`, for each micro-batch, if micro-batches differ. The last is followed by the
            first.

    Raises:
        ValueError: the schedule deadlocks.
    """
    return _Simulation(rows, stages_by_micro_batch or [stages], overlap, noise or Noise()).run(tail)


class _Simulation:
    """State of one simulation."""

    def __init__(
        self,
        rows: Sequence[SlotRow],
        stages_by_micro_batch: Sequence[Sequence[StageSegments]],
        overlap: bool,
        noise: Noise,
    ) -> None:
        self._rows = rows
        self._stages_by_micro_batch = stages_by_micro_batch
        self._stages = stages_by_micro_batch[0]
        self._overlap = overlap
        self._noise = noise
        self._rank_of = {action.stage: rank for rank, row in enumerate(rows) for slot in row for action in slot}
        self._finished_at: dict[ActionResult, float] = {}
        self._arrived_at: dict[ActionResult, float] = {}
        self._rank_free_at = [0.0] * len(rows)
        self._link_free_at: dict[tuple[int, int], float] = {}
        self._events: list[Event] = []

    def run(self, tail: StepTail | None) -> Timeline:
        # A rank's times depend only on its own row and its messages: every order of visits gives the same times.
        num_left = sum(map(len, self._rows))
        for rank, slot in execute_order(self._rows):
            self._run_slot(rank, slot)
            num_left -= 1
        if num_left and (found := find_deadlock(self._rows)):
            raise ValueError(f"deadlock: pipeline rank {found[0]} waits before {found[1][0]}")
        span = max(self._rank_free_at, default=0.0)
        end = span if tail is None else self._run_tail(tail)
        return Timeline(tuple(self._events), len(self._rows), span, end)

    def _segments(self, action: Action) -> Segments:
        stages = self._stages_by_micro_batch[action.micro_batch % len(self._stages_by_micro_batch)]
        return stages[action.stage].segments(action.kind)

    def _ready_at(self, rank: int, action: Action) -> float:
        needs = action.consumes(len(self._stages))
        # The first field of a result is its stage.
        at = ((self._finished_at if self._rank_of[key[0]] == rank else self._arrived_at)[key] for key in needs)
        return max(at, default=0.0)

    def _run_slot(self, rank: int, slot: tuple[Action, ...]) -> None:
        if len(slot) > 1 and self._overlap:
            start = max(self._rank_free_at[rank], *(self._ready_at(rank, action) for action in slot))
            self._run_overlapped(rank, slot, start)
        else:
            for action in slot:
                start = max(self._rank_free_at[rank], self._ready_at(rank, action))
                self._finished_at[action.produces] = self._rank_free_at[rank] = self._run_action(rank, action, start)
        for action in slot:
            self._send(rank, action, self._rank_free_at[rank])

    def _run_action(self, rank: int, action: Action, now: float) -> float:
        factor = self._noise.slowdown(rank, action)
        for piece in self._segments(action):
            now = self._run_segment(rank, action, piece, now, factor)
        return now

    def _run_overlapped(self, rank: int, slot: tuple[Action, ...], start: float) -> None:
        chains = {action: list(self._segments(action)) for action in slot}
        factors = {action: self._noise.slowdown(rank, action) for action in slot}
        ends = dict.fromkeys(slot, start)
        free = {COMPUTE: start, COMMUNICATION: start}
        # The backward pass comes first in a tie.
        order = sorted(slot, key=lambda action: action.kind == "F")
        while any(chains.values()):
            action = min(
                (action for action in order if chains[action]),
                key=lambda action: max(ends[action], free[_stream(chains[action][0])]),
            )
            piece = chains[action].pop(0)
            begin = max(ends[action], free[_stream(piece)])
            ends[action] = free[_stream(piece)] = self._run_segment(rank, action, piece, begin, factors[action])
        self._rank_free_at[rank] = max(ends.values())
        self._finished_at |= {action.produces: end for action, end in ends.items()}

    def _run_segment(self, rank: int, action: Action, segment: CostItem, start: float, factor: float) -> float:
        seconds: float = segment.seconds if segment.is_comm else segment.seconds * factor
        if seconds > 0:
            self._events.append(Event(rank, _stream(segment), segment.part, start, start + seconds, action))
        return start + seconds

    def _send(self, rank: int, action: Action, finished_at: float) -> None:
        if action.kind == "W":
            return
        to_stage = action.stage + (1 if action.kind == "F" else -1)
        peer = self._rank_of.get(to_stage, rank)
        if peer == rank:
            return
        seconds = self._stages[min(action.stage, to_stage)].p2p_s
        start = max(finished_at, self._link_free_at.get((rank, peer), 0.0))
        self._arrived_at[action.produces] = self._link_free_at[rank, peer] = start + seconds
        if seconds > 0:
            self._events.append(Event(rank, SEND, "pp_comm", start, start + seconds, action, peer))

    def _run_tail(self, tail: StepTail) -> float:
        summed = [free + tail.gradients_s for free in self._rank_free_at]
        begin = max(summed)
        for rank, free in enumerate(self._rank_free_at):
            if tail.gradients_s > 0:
                self._events.append(Event(rank, COMMUNICATION, "dp_comm", free, summed[rank], None))
            if tail.optimizer_s > 0:
                self._events.append(Event(rank, COMPUTE, "optimizer", begin, begin + tail.optimizer_s, None))
        return begin + tail.optimizer_s


def simulate_mapping(
    cost_model: CostModel,
    mapping: ParallelMapping,
    noise: Noise | None = None,
    *,
    chunks: tuple[ModelChunk, ...] | None = None,
    schedule: Part | None = None,
) -> Timeline:
    """Simulate one step of a mapping: its schedule, and the end of the step as the cost model prices it.

    Args:
        noise: stragglers and jitter. None: an ideal machine.
        chunks: layers of the stages, in model order. None: split as in the cost model.
        schedule: the mapping's schedule with its settings, such as the path of its file. None: without any.

    Raises:
        ConfigError: the schedule's file is invalid.
    """
    count = mapping.num_micro_batches(cost_model.workload.global_batch_size)
    parts = cost_model.step_time(mapping).parts
    stages_by_micro_batch = [stage_segments(model, mapping, chunks) for model in _models_of_sets(cost_model, count)]
    return simulate(
        schedule_rows(schedule or mapping.schedule, mapping.pp, mapping.vpp, count, overlap=mapping.overlap),
        stage_segments(cost_model, mapping, chunks),
        overlap=mapping.overlap,
        noise=noise,
        tail=StepTail(gradients_s=parts["dp_comm"], optimizer_s=parts["optimizer"]),
        stages_by_micro_batch=stages_by_micro_batch,
    )


MAX_SIMULATED_SETS = 32
"""Micro-batch sets of drawn documents that are priced one by one. Further micro-batches repeat them."""


def _models_of_sets(cost_model: CostModel, num_micro_batches: int) -> list[CostModel]:
    """Return a cost model for each micro-batch set of drawn documents, or none where all sets take equally long."""
    attention = cost_model.workload.attention
    if attention is None:
        return []
    return [
        CostModel(
            cost_model.model_spec,
            cost_model.device,
            replace(cost_model.workload, attention=replace(attention, only_set=index)),
            cost_model.activation_memory,
            cost_model.split,
        )
        for index in range(min(num_micro_batches, MAX_SIMULATED_SETS))
    ]


def chunks_of_stages(stage_plan: StagePlan, model_spec: ModelSpec) -> tuple[ModelChunk, ...]:
    """Return the chunks of the stages of a recipe."""
    return tuple(chunk_of(model_spec.all_layers, stage.parts) for stage in stage_plan.stages)


def stage_segments(
    cost_model: CostModel, mapping: ParallelMapping, chunks: tuple[ModelChunk, ...] | None = None
) -> tuple[StageSegments, ...]:
    """Return the segments of every stage, in model order, with no communication hidden yet.

    Without overlap, the layers of one kind are merged into one long layer: the times are the same, with fewer events.
    """
    plain = replace(mapping, overlap=False)
    layers = [_layer_segments(cost_model, plain, kind) for kind in range(len(cost_model.model_spec.kinds))]
    head = cost_model.head_and_loss_s(mapping)
    if chunks is None:
        chunks = cost_model.split(placed_ranks(mapping.schedule, mapping.pp, mapping.vpp))
    send_s = cost_model.p2p_s(plain)
    return tuple(_combine_stage(chunk, layers, head, send_s, keeps_layers_apart=mapping.overlap) for chunk in chunks)


def _layer_segments(cost_model: CostModel, mapping: ParallelMapping, kind: int) -> StageSegments:
    """Return the segments of one layer of a kind, with its launches and recomputation."""
    mixer, feed_forward = cost_model.blocks(kind, mapping)
    priced = cost_model.layer_time(kind, mapping)
    forward = mixer.forward + feed_forward.forward
    backward = feed_forward.backward + mixer.backward
    recompute = CostItem("recompute", priced.part_s("recompute"))
    launches = CostItem("launch", float(priced.forward_s[0]) - sum(work.seconds for work in forward))
    late_s = float(priced.backward_s[0]) - recompute.seconds - sum(work.seconds for work in backward)
    late_launches = CostItem("launch", late_s)
    computed = sum(work.seconds for work in backward if not work.is_comm)
    share = 1.0 - priced.wgrad_s / computed if computed else 1.0
    inputs = (_scaled(work, 1.0 if work.is_comm else share) for work in backward)
    return StageSegments(
        forward=(*forward, launches),
        backward=(recompute, *backward, late_launches),
        input_gradient=(recompute, *inputs, late_launches),
        weight_gradient=(CostItem("weight_gradients", priced.wgrad_s),),
    )


def _combine_stage(
    chunk: ModelChunk,
    layers: Sequence[StageSegments],
    head: tuple[float, float],
    p2p_s: float,
    *,
    keeps_layers_apart: bool,
) -> StageSegments:
    def chain(kind: str) -> Segments:
        order = list(zip(chunk.kind_counts, layers, strict=True))
        pieces: list[CostItem] = []
        for count, layer in order if kind == "F" else reversed(order):
            if keeps_layers_apart:
                pieces += layer.segments(kind) * count
            elif count:
                pieces += [_scaled(piece, count) for piece in layer.segments(kind)]
        return tuple(piece for piece in pieces if piece.seconds > 0)

    ends = [(CostItem("head", seconds),) if chunk.has_loss else () for seconds in head]
    return StageSegments(
        forward=chain("F") + ends[0],
        backward=ends[1] + chain("B"),
        input_gradient=ends[1] + chain("I"),
        weight_gradient=chain("W"),
        p2p_s=p2p_s,
    )


def _scaled(item: CostItem, factor: float) -> CostItem:
    return item._replace(seconds=item.seconds * factor)


def _stream(item: CostItem) -> str:
    return COMMUNICATION if item.is_comm else COMPUTE
