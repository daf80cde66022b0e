"""A pipeline schedule of the example package."""

from dataclasses import dataclass
from typing import ClassVar

from moefold.config.base.pipeline_actions import RowBuilder, SlotRow
from moefold.config.groups.schedule import SchedulePart


@dataclass(frozen=True, kw_only=True)
class Eager(SchedulePart):
    """1F1B with one more forward pass before the first backward pass."""

    interface: ClassVar[int] = 1
    repeats_steady_phase: ClassVar[bool] = True

    def row(self, rank: int, pp: int, num_stages: int, count: int) -> SlotRow:
        """Return the slots of a pipeline rank."""
        ahead = min(count, pp - rank + 1)
        builder = RowBuilder()
        builder.add(rank, "F" * ahead + "BF" * (count - ahead) + "B" * ahead)
        return builder.row
