"""1F1B (arXiv:2006.09503)."""

from dataclasses import dataclass
from typing import Any, ClassVar

from moefold.config.groups.schedule import SchedulePart
from moefold.config.pipeline_actions import SlotRow
from moefold.config.pipeline_order import RowBuilder, interleaved_bubble_s, interleaved_row, overlapped_interleaved_row


@dataclass(frozen=True, kw_only=True)
class OneForwardOneBackward(SchedulePart):
    """Each rank alternates between one forward and one backward pass."""

    with_other_virtual_stages: ClassVar[str] = "interleaved"
    min_micro_batches_per_rank: ClassVar[int] = 1
    repeats_steady_phase: ClassVar[bool] = True

    def row(self, rank: int, pp: int, num_stages: int, count: int) -> SlotRow:
        """Return the slots of a rank; with several stages per rank, of interleaved 1F1B."""
        if num_stages > 1:
            return interleaved_row(rank, pp, num_stages, count)
        ahead = min(count, pp - rank)
        builder = RowBuilder()
        builder.add(rank, "F" * ahead + "BF" * (count - ahead) + "B" * ahead)
        return builder.row

    def overlapped_row(self, rank: int, pp: int, num_stages: int, count: int) -> SlotRow:
        """Return slots whose steady phase consists of pairs."""
        return overlapped_interleaved_row(rank, pp, num_stages, count)

    def bubble_s(self, forward_s: Any, backward_s: Any, wgrad_s: Any, pp: int, num_stages: Any, count: int) -> Any:
        """Return the bubble of interleaved 1F1B."""
        return interleaved_bubble_s(forward_s, backward_s, pp, num_stages, count)
