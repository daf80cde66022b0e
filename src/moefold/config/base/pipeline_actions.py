"""Actions of a pipeline schedule, the builder of its rows, and their checks for missing work and deadlocks.

A rank runs the slots of its row in order. A slot is one action, or an overlapped forward and backward pass that start
together once the inputs of both are available.
"""

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import count
from typing import NamedTuple

ActionResult = tuple[int, str, int]
"""Result of an action: stage, F, I or W, micro-batch."""


class Action(NamedTuple):
    """One action of a rank."""

    stage: int
    kind: str
    """F forward, B whole backward, I input gradients or W weight gradients."""
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro_batch}"

    @property
    def produces(self) -> ActionResult:
        """Result of the action. A backward pass of either kind counts as I."""
        return self.stage, "I" if self.kind == "B" else self.kind, self.micro_batch

    def consumes(self, num_stages: int) -> tuple[ActionResult, ...]:
        """Return the results that must be available before the action starts."""
        s = self.stage
        m = self.micro_batch
        if self.kind == "F":
            return ((s - 1, "F", m),) if s else ()
        if self.kind == "W":
            return ((s, "I", m),)
        return ((s, "F", m), (s + 1, "I", m)) if s + 1 < num_stages else ((s, "F", m),)


Slot = tuple[Action, ...]
"""Actions that start together: one, or a forward and a backward pass of two micro-batches."""
SlotRow = tuple[Slot, ...]


def one_per_slot(actions: Iterable[Action]) -> SlotRow:
    """Return a row with one action per slot."""
    return tuple((action,) for action in actions)


def split_pairs(row: SlotRow) -> SlotRow:
    """Return the row with the passes of each pair one after the other."""
    if all(len(slot) == 1 for slot in row):
        return row
    return one_per_slot(action for slot in row for action in slot)


def execute_order(rows: Sequence[SlotRow]) -> Iterator[tuple[int, Slot]]:
    """Yield every slot with its rank, after its dependencies, until no rank can continue.

    The set of these slots does not depend on the order of the ranks.
    """
    num_stages = 1 + max((action.stage for row in rows for slot in row for action in slot), default=0)
    results: set[ActionResult] = set()
    num_started = [0] * len(rows)
    has_progress = True
    while has_progress:
        has_progress = False
        for rank, row in enumerate(rows):
            while num_started[rank] < len(row):
                slot = row[num_started[rank]]
                if not all(needed in results for action in slot for needed in action.consumes(num_stages)):
                    break
                yield rank, slot
                results.update(action.produces for action in slot)
                num_started[rank] += 1
                has_progress = True


def find_deadlock(rows: Sequence[SlotRow]) -> tuple[int, Slot] | None:
    """Return the first deadlocked rank and the slot at which it waits, or None."""
    num_started = [0] * len(rows)
    for rank, _ in execute_order(rows):
        num_started[rank] += 1
    stuck = (rank for rank, row in enumerate(rows) if num_started[rank] < len(row))
    return next(((rank, rows[rank][num_started[rank]]) for rank in stuck), None)


def find_problem(rows: Sequence[SlotRow], stage_ranks: Sequence[int], num_micro_batches: int) -> str:
    """Return the fault of the rows of a schedule, as text to follow the schedule's name, or "" if there is none."""
    done_actions: dict[tuple[int, int], list[str]] = {}
    for rank, row in enumerate(rows):
        for action in (action for slot in row for action in slot):
            if not 0 <= action.stage < len(stage_ranks) or stage_ranks[action.stage] != rank:
                stages = [stage for stage, owner in enumerate(stage_ranks) if owner == rank]
                return f": rank {rank} has {action}, and the stages {stages}"
            kinds = done_actions.setdefault((action.stage, action.micro_batch), [])
            if action.kind in kinds:
                return f": {action} occurs twice; leave one out"
            kinds.append(action.kind)
    for stage in range(len(stage_ranks)):
        for micro_batch in range(num_micro_batches):
            kinds = done_actions.pop((stage, micro_batch), [])
            if sorted(kinds) not in (["B", "F"], ["F", "I", "W"]):
                return (
                    f": stage {stage} does {', '.join(kinds) or 'nothing'} with micro-batch {micro_batch}; it must do "
                    "F and B, or F, I and W"
                )
    for stage, micro_batch in done_actions:
        return f": stage {stage} has micro-batch {micro_batch}, and there are {num_micro_batches}"
    if stuck := find_deadlock(rows):
        rank, (waiting, *_) = stuck
        return f" deadlocks: rank {rank} waits before {waiting}, because its input comes later; reorder the rows"
    return ""


def find_swapped(rows: Sequence[SlotRow]) -> tuple[Action, Action] | None:
    """Return two forward passes of a stage of which the first is of a later micro-batch, or None."""
    last: dict[int, Action] = {}
    for action in (action for row in rows for slot in row for action in slot if action.kind == "F"):
        before = last.setdefault(action.stage, action)
        if before.micro_batch > action.micro_batch:
            return before, action
        last[action.stage] = action
    return None


SLOT_KINDS = (["F"], ["B"], ["I"], ["W"], ["F", "B"])
"""Kinds of the actions of a slot."""


def find_undeclared(rows: Sequence[SlotRow], *, splits_backward: bool) -> str:
    """Return the invalid slots of rows, or slots that contradict the facts of their schedule."""
    slots = [slot for row in rows for slot in row]
    if undeclared := next((slot for slot in slots if [action.kind for action in slot] not in SLOT_KINDS), None):
        return f" has {', '.join(map(str, undeclared))} in one slot; a slot is one action, or F and then B"
    if not splits_backward and any(slot[0].kind == "W" for slot in slots):
        return " has W actions, and splits_backward=False; set it to True"
    return ""


class RowBuilder:
    """Builder of a row: each kind of action of a stage takes its micro-batches in order."""

    def __init__(self) -> None:
        self._slots: list[Slot] = []
        self._numbers = defaultdict[tuple[int, str], "count[int]"](count)
        self._pending_weight_grads = deque[int]()

    @property
    def row(self) -> SlotRow:
        """The slots so far."""
        return tuple(self._slots)

    def add(self, stage: int, kinds: str) -> None:
        """Append the next micro-batch of each of these kinds, one per slot. B advances both I and W."""
        for kind in kinds:
            self._slots.append((self._next_action(stage, kind),))

    def add_pair(self, forward: int, backward: int) -> None:
        """Append a pair: the forward pass of one stage and the whole backward pass of another micro-batch."""
        self._slots.append((self._next_action(forward, "F"), self._next_action(backward, "B")))

    def add_input_grad(self, stage: int) -> None:
        """Append the next I action of a stage, and keep its W action pending."""
        self.add(stage, "I")
        self._pending_weight_grads.append(stage)

    def add_weight_grads(self, num_actions: int | None = None) -> None:
        """Append up to `num_actions` of the oldest pending W actions. None: all."""
        pending = self._pending_weight_grads
        for _ in range(len(pending) if num_actions is None else min(num_actions, len(pending))):
            self.add(pending.popleft(), "W")

    def _next_action(self, stage: int, kind: str) -> Action:
        if kind == "B":
            next(self._numbers[stage, "W"])
        return Action(stage, kind, next(self._numbers[stage, "I" if kind == "B" else kind]))
