"""ZBV (arXiv:2401.10241)."""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from moefold.config.groups.schedule import SchedulePart
from moefold.config.pipeline_actions import SlotRow
from moefold.config.pipeline_order import RowBuilder


@dataclass(frozen=True, kw_only=True)
class ZeroBubbleV(SchedulePart):
    """Zero-bubble with two stages on each rank, placed as a V."""

    placement: ClassVar[Literal["loop", "v"]] = "v"
    virtual_stage_bounds: ClassVar[tuple[int, int | None]] = (2, 2)
    splits_backward: ClassVar[bool] = True
    repeats_steady_phase: ClassVar[bool] = True

    def row(self, rank: int, pp: int, num_stages: int, count: int) -> SlotRow:
        """Return the row for at least 2*pp-1 micro-batches, cut to `count`."""
        first = rank
        second = 2 * pp - 1 - rank
        drawn = max(2 * pp - 1, count)
        builder = RowBuilder()
        builder.add(first, "F" * (2 * (pp - rank) - 1))
        for _ in range(rank):
            builder.add(second, "F")
            builder.add(first, "F")
        builder.add(second, "FIW" * (pp - rank))
        started = 2 * pp - 1 - rank
        num_done = pp
        while num_done < started or started < drawn:
            if started < drawn:
                builder.add(first, "F")
                started += 1
            builder.add(first, "IW")
            builder.add(second, "FIW")
            num_done += 1
        for _ in range(rank):
            builder.add(first, "I")
            builder.add(second, "I")
        builder.add(first, "IW" * (pp - rank))
        builder.add(second, "W" * rank)
        builder.add(first, "W" * rank)
        return tuple(slot for slot in builder.row if slot[0].micro_batch < count)

    def bubble_s(self, forward_s: Any, backward_s: Any, wgrad_s: Any, pp: int, num_stages: Any, count: int) -> Any:
        """Return half of the bubble of zero-bubble at both ends, for at least 2*pp-1 micro-batches."""
        import numpy as np

        step_s = forward_s + backward_s
        unfilled = (pp - 1) * (step_s - wgrad_s)
        filled = np.maximum(unfilled - (min(count, pp) - 1) * wgrad_s, (pp - 1) * step_s / 3)
        share = min(1.0, (count - 1) / (2 * pp - 2))
        return (1 - share) * unfilled + share * filled / 2
