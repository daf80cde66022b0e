"""Interleaved 1F1B (arXiv:2104.04473)."""

from dataclasses import dataclass
from typing import Any, ClassVar

from moefold.config.groups.schedule import SchedulePart
from moefold.config.pipeline_actions import SlotRow
from moefold.config.pipeline_order import interleaved_bubble_s, interleaved_row, overlapped_interleaved_row


@dataclass(frozen=True, kw_only=True)
class InterleavedSchedule(SchedulePart):
    """1F1B with several stages on each rank, so that a rank begins earlier."""

    virtual_stage_bounds: ClassVar[tuple[int, int | None]] = (2, None)
    with_other_virtual_stages: ClassVar[str] = "1f1b"
    runs_equal_rounds: ClassVar[bool] = True
    repeats_steady_phase: ClassVar[bool] = True

    def row(self, rank: int, pp: int, num_stages: int, count: int) -> SlotRow:
        """Return the slots of a rank in rounds of micro-batches."""
        return interleaved_row(rank, pp, num_stages, count)

    def overlapped_row(self, rank: int, pp: int, num_stages: int, count: int) -> SlotRow:
        """Return slots whose steady phase consists of pairs."""
        return overlapped_interleaved_row(rank, pp, num_stages, count)

    def bubble_s(self, forward_s: Any, backward_s: Any, wgrad_s: Any, pp: int, num_stages: Any, count: int) -> Any:
        """Return the bubble of interleaved 1F1B."""
        return interleaved_bubble_s(forward_s, backward_s, pp, num_stages, count)
