"""DualPipeV (arXiv:2412.19437)."""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from moefold.config.groups.schedule import SchedulePart
from moefold.config.pipeline_actions import SlotRow
from moefold.config.pipeline_order import RowBuilder


@dataclass(frozen=True, kw_only=True)
class DualPipeV(SchedulePart):
    """Pairs of forward and backward passes of two stages, placed as a V."""

    placement: ClassVar[Literal["loop", "v"]] = "v"
    virtual_stage_bounds: ClassVar[tuple[int, int | None]] = (2, 2)
    splits_backward: ClassVar[bool] = True
    min_micro_batches_per_rank: ClassVar[int] = 2
    with_fewer_micro_batches: ClassVar[str] = "zbv"
    repeats_steady_phase: ClassVar[bool] = True

    def row(self, rank: int, pp: int, num_stages: int, count: int) -> SlotRow:
        """Return the eight phases of github.com/deepseek-ai/DualPipe and torch."""
        first = rank
        second = 2 * pp - 1 - rank
        num_later = pp - rank - 1
        builder = RowBuilder()
        builder.add(first, "F" * (2 * num_later))
        for _ in range(rank + 1):
            builder.add(first, "F")
            builder.add(second, "F")
        for _ in range(num_later):
            builder.add_input_grad(second)
            builder.add_weight_grads(1)
            builder.add(second, "F")
        for i in range(count - 2 * pp + rank + 1):
            if i == 0 and num_later == 0:
                # This rank has both stages at the bottom of the V: without an overlap they make a smaller bubble.
                builder.add(first, "F")
                builder.add(second, "B")
            else:
                builder.add_pair(first, second)
            builder.add_pair(second, first)
        for _ in range(num_later):
            builder.add(second, "B")
            builder.add_pair(second, first)
        # From the middle of the last backward passes on, W actions are deferred to fill the remaining bubble.
        splits_from = 2 * ((rank + 1) // 2) + (rank % 2 == 0)
        for i, stage in enumerate((second, first) * (rank + 1)):
            if i < splits_from:
                builder.add(stage, "B")
            else:
                builder.add_input_grad(stage)
        for _ in range(num_later):
            builder.add_weight_grads(1)
            builder.add_input_grad(first)
        builder.add_weight_grads(rank + 1)
        return builder.row

    def overlapped_row(self, rank: int, pp: int, num_stages: int, count: int) -> SlotRow:
        """Return `row`, whose pairs overlap."""
        return self.row(rank, pp, num_stages, count)

    def bubble_s(self, forward_s: Any, backward_s: Any, wgrad_s: Any, pp: int, num_stages: Any, count: int) -> Any:
        """Return (pp-1)(f+2b-3w)/2."""
        import numpy as np

        return (pp - 1) * np.maximum(forward_s + 2 * backward_s - 3 * wgrad_s, 0.0) / 2
