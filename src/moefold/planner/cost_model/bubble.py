"""Idle time of a pipeline schedule, in closed form if there is one, else by execution of its rows."""

from functools import lru_cache
from typing import Any

import numpy as np

from moefold.config.base.part import Part
from moefold.config.base.pipeline_actions import ActionResult, Slot, execute_order
from moefold.topology.schedules import schedule_named, schedule_rows


def bubble_s(
    forward_s: Any, backward_s: Any, wgrad_s: Any, *, pp: int, vpp: Any, num_micro_batches: int, schedule: str | Part
) -> Any:
    """Return the idle seconds of a rank in one step: the seconds of the step beyond the rank's work.

    Args:
        forward_s: one micro-batch forward through all chunks of one rank. All times are numbers or arrays.
        backward_s: the same backward, weight gradients included.
        wgrad_s: the weight-gradient part of `backward_s`.
        num_micro_batches: micro-batches of a step. With fewer than pp, no schedule keeps all ranks busy.
        schedule: as in a recipe. "1f1b" with vpp of 2 or more is the interleaved form (arXiv:2104.04473).
    """
    if pp == 1:
        return 0.0
    closed_form = schedule_named(schedule).bubble_s(forward_s, backward_s, wgrad_s, pp, vpp, num_micro_batches)
    if closed_form is not None:
        return closed_form
    if isinstance(vpp, np.ndarray):
        times = zip(forward_s, backward_s, wgrad_s, vpp.flat, strict=True)
        return np.array([simulated_bubble_s(schedule, f, b, w, pp, int(v), num_micro_batches) for f, b, w, v in times])
    return simulated_bubble_s(schedule, forward_s, backward_s, wgrad_s, pp, vpp, num_micro_batches)


def simulated_bubble_s(
    schedule: str | Part, forward_s: Any, backward_s: Any, wgrad_s: Any, pp: int, vpp: int, num_micro_batches: int
) -> Any:
    """Execute the rows of a schedule with equal chunks and messages that take no time, for `bubble_s`."""
    seconds = {"F": forward_s / vpp, "B": backward_s / vpp, "I": (backward_s - wgrad_s) / vpp, "W": wgrad_s / vpp}
    finished_at: dict[ActionResult, Any] = {}
    rank_free_at: list[Any] = [0.0] * pp
    for rank, slot in _slots_in_order(schedule, pp, vpp, num_micro_batches):
        now = rank_free_at[rank]
        for action in slot:
            for needed in action.consumes(pp * vpp):
                now = np.maximum(now, finished_at[needed])
        for action in slot:
            now = now + seconds[action.kind]
        finished_at.update((action.produces, now) for action in slot)
        rank_free_at[rank] = now
    end = rank_free_at[0]
    for free_at in rank_free_at[1:]:
        end = np.maximum(end, free_at)
    return end - num_micro_batches * (forward_s + backward_s)


@lru_cache(maxsize=256)
def _slots_in_order(schedule: str | Part, pp: int, vpp: int, num_micro_batches: int) -> tuple[tuple[int, Slot], ...]:
    """Return every slot with its rank, each after its dependencies."""
    return tuple(execute_order(schedule_rows(schedule, pp, vpp, num_micro_batches)))
