"""The work of pipeline ranks, piece by piece. Torch-free.

Through the rows of a pipeline schedule as far as order and needs allow. Torch-free.

A rank goes through the slots of its row in order. A slot is one action, or a forward and a backward pass that begin
together, when both have what they need.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

ActionResult = tuple[int, str, int]
"""A result: stage, F, I or W, micro-batch."""


@dataclass(frozen=True)
class Action:
    """One piece of work of a rank."""

    stage: int
    kind: str
    """F, B, I or W."""
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro_batch}"

    @property
    def produces(self) -> ActionResult:
        """What is there once it is done; a backward pass of either kind counts as I."""
        return self.stage, "I" if self.kind == "B" else self.kind, self.micro_batch

    def consumes(self, num_stages: int) -> tuple[ActionResult, ...]:
        """What must be there before."""
        s, m = self.stage, self.micro_batch
        if self.kind == "F":
            return ((s - 1, "F", m),) if s else ()
        if self.kind == "W":
            return ((s, "I", m),)
        return ((s, "F", m), (s + 1, "I", m)) if s + 1 < num_stages else ((s, "F", m),)


ScheduleRow = tuple[Action, ...]
Slot = tuple[Action, ...]
"""What a rank begins together: one action, or a forward and a backward pass of two micro-batches."""
SlotRow = tuple[Slot, ...]


@dataclass(frozen=True)
class ScheduleTable:
    """The actions of every pipeline rank, in order, and where the stages stand."""

    rows: tuple[ScheduleRow, ...]
    stage_to_rank: tuple[int, ...]
    """Pipeline rank of each stage."""


def one_per_slot(row: ScheduleRow) -> SlotRow:
    """Each action in a slot of its own."""
    return tuple((action,) for action in row)


def execute_order(rows: Sequence[SlotRow]) -> Iterator[tuple[int, Slot]]:
    """Yield every slot with its rank, each behind all that it needs; end where no rank can go on.

    Nothing but a rank's own row and what others made decides when it can: any order of visits gets as far.
    """
    num_stages = 1 + max((action.stage for row in rows for slot in row for action in slot), default=0)
    made: set[ActionResult] = set()
    begun = [0] * len(rows)
    is_moving = True
    while is_moving:
        is_moving = False
        for rank, row in enumerate(rows):
            while begun[rank] < len(row):
                slot = row[begun[rank]]
                if not all(need in made for action in slot for need in action.consumes(num_stages)):
                    break
                yield rank, slot
                made.update(action.produces for action in slot)
                begun[rank] += 1
                is_moving = True


def find_deadlock(rows: Sequence[SlotRow]) -> tuple[int, Slot] | None:
    """The first rank that cannot end, because what it needs comes later, and the slot before which it waits."""
    begun = [0] * len(rows)
    for rank, _ in execute_order(rows):
        begun[rank] += 1
    stuck = (rank for rank, row in enumerate(rows) if begun[rank] < len(row))
    return next(((rank, rows[rank][begun[rank]]) for rank in stuck), None)
