"""GPipe (arXiv:1811.06965)."""

from dataclasses import dataclass
from typing import Any, ClassVar

from moefold.config.groups.schedule import SchedulePart
from moefold.config.pipeline_actions import SlotRow
from moefold.config.pipeline_order import RowBuilder, interleaved_bubble_s


@dataclass(frozen=True, kw_only=True)
class GPipe(SchedulePart):
    """All forward passes, then all backward passes."""

    with_other_virtual_stages: ClassVar[str] = "interleaved"

    def row(self, rank: int, pp: int, num_stages: int, count: int) -> SlotRow:
        """Return all forward passes, then all backward passes."""
        builder = RowBuilder()
        builder.add(rank, "F" * count)
        builder.add(rank, "B" * count)
        return builder.row

    def bubble_s(self, forward_s: Any, backward_s: Any, wgrad_s: Any, pp: int, num_stages: Any, count: int) -> Any:
        """Return the bubble of interleaved 1F1B."""
        return interleaved_bubble_s(forward_s, backward_s, pp, num_stages, count)
