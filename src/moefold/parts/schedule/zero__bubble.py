"""Zero-bubble ZB1P (arXiv:2401.10241)."""

from dataclasses import dataclass
from typing import Any, ClassVar

from moefold.config.groups.schedule import SchedulePart
from moefold.config.pipeline_actions import SlotRow
from moefold.config.pipeline_order import RowBuilder, interleaved_stages


@dataclass(frozen=True, kw_only=True)
class ZeroBubble(SchedulePart):
    """1F1B whose weight gradients fill the waits, interleaved if there are several stages per rank."""

    virtual_stage_bounds: ClassVar[tuple[int, int | None]] = (1, None)
    splits_backward: ClassVar[bool] = True
    runs_equal_rounds: ClassVar[bool] = True
    repeats_steady_phase: ClassVar[bool] = True

    def row(self, rank: int, pp: int, num_stages: int, count: int) -> SlotRow:
        """Return the slots of a rank, with a W action after each backward pass from its `rank`-th on."""
        forward, backward, per_round = interleaved_stages(rank, pp, num_stages, count)
        ahead = min((num_stages - 1) * per_round + pp - 1 - rank, len(forward))
        builder = RowBuilder()
        for stage in forward[:ahead]:
            builder.add(stage, "F")
        for i, stage in enumerate(backward):
            if ahead + i < len(forward):
                builder.add(forward[ahead + i], "F")
            builder.add_input_grad(stage)
            if i >= rank:
                builder.add_weight_grads(1)
        builder.add_weight_grads()
        return builder.row

    def bubble_s(self, forward_s: Any, backward_s: Any, wgrad_s: Any, pp: int, num_stages: Any, count: int) -> Any:
        """Return (pp-1)(f+b-2w)/vpp (ZB-H1, arXiv:2401.10241), at least a third of the bubble of interleaved 1F1B.

        A rank's wait is filled with weight gradients of earlier micro-batches. With fewer than pp micro-batches it is
        either (pp-n)w longer, or the sequential time through all chunks.
        """
        import numpy as np

        full = forward_s + backward_s
        num_active = min(count, pp)
        without_wgrad = full - wgrad_s
        sequential = pp * without_wgrad + ((num_active - 1) * without_wgrad + wgrad_s) / num_stages - num_active * full
        filled = (pp - 1) * np.maximum(full - 2 * wgrad_s, full / 3) / num_stages + (pp - num_active) * wgrad_s
        return np.maximum(sequential, filled)
