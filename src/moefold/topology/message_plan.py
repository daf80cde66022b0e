"""Plan of the messages of a pipeline: when each rank posts receives, sends, and releases sent tensors.

A rank runs the operations of its plan in order. The plan comes from one simulated execution of all ranks. There a
message is sent and its receive posted at the same point of a common order, and a send is waited for after that point.
Each rank follows this order, and an operation waits only for earlier operations, so that no rank can deadlock. This
holds for messages in any order, for queues of a pair of ranks or of a rank, and if `isend` and `irecv` block.

A receive is posted when its message is sent in the simulation, at most `CHANNEL_CAPACITY` ahead of the stage that needs
it. A sent tensor is released once its message is consumed there. The memory does not grow with the number of
micro-batches, unless the schedule itself needs that.
"""

import heapq
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from moefold.config.base.pipeline_actions import Action, ActionResult, Slot, SlotRow

CHANNEL_CAPACITY = 2
"""Messages from one stage to the next that may wait there. A schedule that would deadlock may have more."""
DURATIONS = {"F": 1.0, "I": 1.0, "W": 1.0, "B": 2.0}
"""Simulated durations of the actions. They decide how far ahead messages are received, not whether a plan is safe."""


@dataclass(unsafe_hash=True, slots=True)
class Receive:
    """Allocate a buffer for a message and post its receive."""

    message: ActionResult
    peer: int
    """Pipeline rank that sends."""


@dataclass(unsafe_hash=True, slots=True)
class Send:
    """Start to send a message."""

    message: ActionResult
    peer: int
    """Pipeline rank that receives."""


@dataclass(unsafe_hash=True, slots=True)
class Release:
    """Wait until a message is sent, and free it."""

    message: ActionResult


Operation = Receive | Send | Release | Slot
RankPlan = tuple[Operation, ...]
"""Operations of a pipeline rank, in order: its slots, and the messages between them."""


def consumer(result: ActionResult, num_stages: int) -> int | None:
    """Return the stage that needs the hidden states or the gradient of an action, or None."""
    stage, kind, _ = result
    target = stage + {"F": 1, "I": -1}.get(kind, num_stages)
    return target if 0 <= target < num_stages else None


def received(action: Action, num_stages: int) -> ActionResult | None:
    """Return the hidden states or the gradient that an action needs from another stage, or None."""
    stage, kind, micro_batch = action
    if kind == "F":
        return (stage - 1, "F", micro_batch) if stage else None
    return (stage + 1, "I", micro_batch) if kind != "W" and stage + 1 < num_stages else None


def plan_messages(rows: Sequence[SlotRow], stage_ranks: Sequence[int]) -> tuple[RankPlan, ...]:
    """Plan the messages of a schedule.

    Args:
        rows: the slots of every pipeline rank, free of deadlocks.
        stage_ranks: the pipeline rank of each stage.

    Raises:
        ValueError: the rows deadlock.
    """
    return _Planner(rows, stage_ranks).run()


def forward_rows(rows: Sequence[SlotRow]) -> tuple[SlotRow, ...]:
    """Return the forward passes of a schedule, in its order."""
    return tuple(tuple((action,) for slot in row for action in slot if action.kind == "F") for row in rows)


def live_messages(plan: RankPlan, num_stages: int, *, overlaps: bool) -> list[int]:
    """Count the messages in memory while each slot of a plan runs, without messages that it consumes or produces.

    Counted are posted receives, sent tensors that are not released, and inputs of another stage of the rank.

    Args:
        overlaps: whether the actions of a slot run at the same time. Otherwise they run one after the other, and each
            is counted.
    """
    counts = []
    live = 0
    for operation in plan:
        if isinstance(operation, tuple):
            for group in (operation,) if overlaps or len(operation) == 1 else [(action,) for action in operation]:
                for action in group:
                    live -= received(action, num_stages) is not None
                counts.append(live)
                for action in group:
                    live += consumer(action.produces, num_stages) is not None
        elif not isinstance(operation, Send):
            # A sent tensor is counted from the end of its slot on.
            live += 1 if isinstance(operation, Receive) else -1
    assert live == 0, "all messages are consumed and released"
    return counts


class _Planner:
    """One simulated execution of all ranks."""

    def __init__(self, rows: Sequence[SlotRow], stage_ranks: Sequence[int]) -> None:
        self._rows = rows
        self._rank_of = stage_ranks
        self._num_stages = len(stage_ranks)
        self._plans: list[list[Operation]] = [[] for _ in rows]
        self._left = [iter(row) for row in rows]
        self._slots: list[Slot | None] = [None for _ in rows]
        """The slot that each rank runs or waits to start, None at its end."""
        self._missing: list[list[ActionResult]] = [[] for _ in rows]
        """Inputs of these slots that may not exist yet."""
        self._idle: set[int] = set()
        self._results: set[ActionResult] = set()
        self._waiting = defaultdict[tuple[int, str], int](int)
        self._running: list[tuple[float, int]] = []

    def run(self) -> tuple[RankPlan, ...]:
        """Execute all slots, and return the plan of each rank."""
        now = 0.0
        for rank in range(len(self._rows)):
            self._await_next_slot(rank)
        while True:
            self._start_slots(now)
            if not self._running:
                break
            now = self._running[0][0]
            while self._running and self._running[0][0] == now:
                self._finish_slot(heapq.heappop(self._running)[1])
        if any(self._slots):
            raise ValueError("the schedule deadlocks")
        return tuple(map(tuple, self._plans))

    def _await_next_slot(self, rank: int) -> None:
        slot = self._slots[rank] = next(self._left[rank], None)
        if slot is not None:
            self._idle.add(rank)
            self._missing[rank] = [needed for action in slot for needed in action.consumes(self._num_stages)]

    def _has_inputs(self, rank: int) -> bool:
        missing = self._missing[rank]
        while missing and missing[-1] in self._results:
            missing.pop()
        return not missing

    def _start_slots(self, now: float) -> None:
        """Start the next slot of every idle rank that has its inputs, and room for its outputs at their receivers."""
        with_inputs = [
            (rank, slot) for rank in sorted(self._idle) if (slot := self._slots[rank]) and self._has_inputs(rank)
        ]
        for rank, slot in with_inputs:
            if all(self._waiting[action.stage, action.produces[1]] < CHANNEL_CAPACITY for action in slot):
                self._start_slot(rank, slot, now)
        if with_inputs and not self._running:
            # All ranks lack room: one of them needs more, or nothing would ever be consumed.
            self._start_slot(*with_inputs[0], now)

    def _start_slot(self, rank: int, slot: Slot, now: float) -> None:
        self._idle.discard(rank)
        self._plans[rank].append(slot)
        heapq.heappush(self._running, (now + sum(DURATIONS[action.kind] for action in slot), rank))
        for action in slot:
            message = received(action, self._num_stages)
            if message is not None:
                self._waiting[message[0], message[1]] -= 1
                sender = self._rank_of[message[0]]
                if sender != rank:
                    self._plans[sender].append(Release(message))

    def _finish_slot(self, rank: int) -> None:
        for action in self._slots[rank] or ():
            result = action.produces
            self._results.add(result)
            target = consumer(result, self._num_stages)
            if target is None:
                continue
            self._waiting[result[0], result[1]] += 1
            peer = self._rank_of[target]
            if peer != rank:
                self._plans[rank].append(Send(result, peer))
                self._plans[peer].append(Receive(result, rank))
        self._await_next_slot(rank)
