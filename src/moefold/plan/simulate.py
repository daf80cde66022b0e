"""A step played out on paper: the actions of a pipeline schedule over stages, streams and links. Torch-free.

Every pipeline rank has two streams, for compute and for the collectives inside a stage (tp, cp, ep, etp), and a link to
each rank that it sends to. A rank goes through the slots of its row in order. An action is a chain of pieces, each on
one stream, each behind the one before it. Alone in its slot an action has both streams to itself; two that overlap
begin when both have what they need and share the streams, each of which serves whoever comes first, the backward pass
where both come at once. What another rank waits for goes over the link when the slot has ended and the link is free;
the receiver need not be ready.

The ranks that share a stage are taken to run in step: one rank stands for all of them.
"""

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from moefold.config.action import Action, Made, SlotRow
from moefold.config.schedule_walk import waits_for_ever, walk
from moefold.plan.timeline import COMMUNICATION, COMPUTE, SEND, Event, Timeline


@dataclass(frozen=True, slots=True)
class Piece:
    """A stretch of an action on one stream."""

    part: str
    """What it is, in the words of the cost model."""
    seconds: float
    stream: str = COMPUTE


Pieces = tuple[Piece, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class StageWork:
    """What one stage does with one micro-batch."""

    forward: Pieces
    backward: Pieces
    """The whole of it, where the schedule does not split it."""
    input_gradient: Pieces
    weight_gradient: Pieces
    send_s: float = 0.0
    """Of the hidden states to the next stage, if that is on another rank, and of their gradients back."""

    def pieces(self, kind: str) -> Pieces:
        """The chain of an action."""
        chains = {"F": self.forward, "B": self.backward, "I": self.input_gradient, "W": self.weight_gradient}
        return chains[kind]


@dataclass(frozen=True, kw_only=True, slots=True)
class Disturbance:
    """What keeps a machine from being ideal. It makes compute slower; collectives and messages take as long."""

    slow: Mapping[int, float] = field(default_factory=dict)
    """How many times as long a pipeline rank computes."""
    jitter: float = 0.0
    """Standard deviation of the logarithm of the time of each action, whose median stays."""
    seed: int = 0

    def factor(self, rank: int, action: Action) -> float:
        """How many times as long an action computes; the same whenever and in whatever order it is asked for."""
        times = self.slow.get(rank, 1.0)
        if self.jitter == 0.0:
            return times
        return times * math.exp(self.jitter * random.Random(f"{self.seed}/{rank}/{action}").gauss(0.0, 1.0))


@dataclass(frozen=True, slots=True)
class Closing:
    """What ends a step, behind the last backward pass of a rank."""

    gradients_s: float = 0.0
    """Of the gradients' sums over data-parallel ranks that no compute hides."""
    optimizer_s: float = 0.0
    """Of the update, which begins everywhere at once: it knows the norm of all gradients."""


def simulate(
    rows: Sequence[SlotRow],
    stages: Sequence[StageWork],
    *,
    overlap: bool = False,
    disturbance: Disturbance | None = None,
    closing: Closing | None = None,
) -> Timeline:
    """Play a step out.

    Args:
        rows: the slots of every pipeline rank, of `slot.slot_rows`.
        stages: in the order of the model.
        overlap: the two actions of a slot run at the same time; else one after the other.
        disturbance: stragglers and jitter; None: an ideal machine.
        closing: the end of the step; None leaves it out.

    Raises:
        ValueError: the ranks would wait for each other for ever.
    """
    return _Run(rows, stages, overlap, disturbance or Disturbance()).play(closing)


class _Run:
    """One simulation under way."""

    def __init__(
        self, rows: Sequence[SlotRow], stages: Sequence[StageWork], overlap: bool, disturbance: Disturbance
    ) -> None:
        self._rows, self._stages = rows, stages
        self._overlap, self._disturbance = overlap, disturbance
        self._rank_of = {action.stage: rank for rank, row in enumerate(rows) for slot in row for action in slot}
        self._made: dict[Made, float] = {}
        self._arrived: dict[Made, float] = {}
        self._free = [0.0] * len(rows)
        self._link_free: dict[tuple[int, int], float] = {}
        self._events: list[Event] = []

    def play(self, closing: Closing | None) -> Timeline:
        # Nothing but a rank's own row and what it is sent decides when it works: any order of visits gives these times.
        num_left = sum(map(len, self._rows))
        for rank, slot in walk(self._rows):
            self._do(rank, slot)
            num_left -= 1
        if num_left and (found := waits_for_ever(self._rows)):
            raise ValueError(f"pipeline rank {found[0]} waits for ever before {found[1][0]}")
        span = max(self._free, default=0.0)
        end = span if closing is None else self._close(closing)
        return Timeline(tuple(self._events), len(self._rows), span, end)

    def _is_here(self, rank: int, key: Made) -> bool:
        return self._rank_of[key[0]] == rank

    def _ready(self, rank: int, action: Action) -> float:
        needs = action.needs(len(self._stages))
        return max((self._made[key] if self._is_here(rank, key) else self._arrived[key] for key in needs), default=0.0)

    def _do(self, rank: int, slot: tuple[Action, ...]) -> None:
        if len(slot) > 1 and self._overlap:
            start = max(self._free[rank], *(self._ready(rank, action) for action in slot))
            self._together(rank, slot, start)
        else:
            for action in slot:
                start = max(self._free[rank], self._ready(rank, action))
                self._made[action.makes] = self._free[rank] = self._chain(rank, action, start)
        for action in slot:
            self._send(rank, action, self._free[rank])

    def _chain(self, rank: int, action: Action, now: float) -> float:
        factor = self._disturbance.factor(rank, action)
        for piece in self._stages[action.stage].pieces(action.kind):
            now = self._run(rank, action, piece, now, factor)
        return now

    def _together(self, rank: int, slot: tuple[Action, ...], start: float) -> None:
        chains = {action: list(self._stages[action.stage].pieces(action.kind)) for action in slot}
        factors = {action: self._disturbance.factor(rank, action) for action in slot}
        ends = dict.fromkeys(slot, start)
        free = {COMPUTE: start, COMMUNICATION: start}
        # The backward pass comes first where both could go on.
        order = sorted(slot, key=lambda action: action.kind == "F")
        while any(chains.values()):
            action = min(
                (action for action in order if chains[action]),
                key=lambda action: max(ends[action], free[chains[action][0].stream]),
            )
            piece = chains[action].pop(0)
            begin = max(ends[action], free[piece.stream])
            ends[action] = free[piece.stream] = self._run(rank, action, piece, begin, factors[action])
        self._free[rank] = max(ends.values())
        self._made |= {action.makes: end for action, end in ends.items()}

    def _run(self, rank: int, action: Action, piece: Piece, start: float, factor: float) -> float:
        seconds = piece.seconds * factor if piece.stream == COMPUTE else piece.seconds
        if seconds > 0:
            self._events.append(Event(rank, piece.stream, piece.part, start, start + seconds, action))
        return start + seconds

    def _send(self, rank: int, action: Action, made: float) -> None:
        if action.kind == "W":
            return
        to_stage = action.stage + (1 if action.kind == "F" else -1)
        peer = self._rank_of.get(to_stage, rank)
        if peer == rank:
            return
        seconds = self._stages[min(action.stage, to_stage)].send_s
        start = max(made, self._link_free.get((rank, peer), 0.0))
        self._arrived[action.makes] = self._link_free[rank, peer] = start + seconds
        if seconds > 0:
            self._events.append(Event(rank, SEND, "pp_comm", start, start + seconds, action, peer))

    def _close(self, closing: Closing) -> float:
        summed = [free + closing.gradients_s for free in self._free]
        begin = max(summed)
        for rank, free in enumerate(self._free):
            if closing.gradients_s > 0:
                self._events.append(Event(rank, COMMUNICATION, "dp_comm", free, summed[rank], None))
            if closing.optimizer_s > 0:
                self._events.append(Event(rank, COMPUTE, "optimizer", begin, begin + closing.optimizer_s, None))
        return begin + closing.optimizer_s
