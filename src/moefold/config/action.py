"""The work of pipeline ranks, piece by piece. Torch-free."""

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
