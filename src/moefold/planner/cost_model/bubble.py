"""Idle time of a pipeline schedule: in closed form where there is one, else by execution of its rows. Torch-free."""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np

from moefold.planner.cost_model.workload import elementwise_max
from moefold.topology.pipeline_action import ActionResult, Slot, execute_order
from moefold.topology.schedules import schedule_rows


def bubble_s(
    forward_s: Any, backward_s: Any, wgrad_s: Any, *, pp: int, vpp: Any, num_micro_batches: int, schedule: str
) -> Any:
    """Return the idle seconds of a rank in one step: what the step takes longer than the work of a rank.

    Args:
        forward_s: one micro-batch forward through all chunks of one rank; like the other times a number or an array.
        backward_s: the same backward, weight gradients included.
        wgrad_s: the weight-gradient part of `backward_s`.
        pp: pipeline ranks.
        vpp: chunks on each rank.
        num_micro_batches: micro-batches of a step. With fewer than pp, no schedule keeps all ranks busy.
        schedule: as in a recipe; "1f1b" with vpp of 2 or more is the interleaved form (arXiv:2104.04473).
    """
    if pp == 1:
        return 0.0
    if formula := CLOSED_FORMS.get(schedule):
        return formula(forward_s, backward_s, wgrad_s, pp, vpp, num_micro_batches)
    if isinstance(vpp, np.ndarray):
        times = zip(forward_s, backward_s, wgrad_s, vpp.flat, strict=True)
        return np.array([simulated_bubble_s(schedule, f, b, w, pp, int(v), num_micro_batches) for f, b, w, v in times])
    return simulated_bubble_s(schedule, forward_s, backward_s, wgrad_s, pp, vpp, num_micro_batches)


def simulated_bubble_s(
    schedule: str, forward_s: Any, backward_s: Any, wgrad_s: Any, pp: int, vpp: int, num_micro_batches: int
) -> Any:
    """Execute the rows of a schedule with equal chunks and messages that take no time; see `bubble_s`."""
    seconds = {"F": forward_s / vpp, "B": backward_s / vpp, "I": (backward_s - wgrad_s) / vpp, "W": wgrad_s / vpp}
    finished_at: dict[ActionResult, Any] = {}
    rank_free_at: list[Any] = [0.0] * pp
    for rank, slot in _slots_in_order(schedule, pp, vpp, num_micro_batches):
        now = rank_free_at[rank]
        for action in slot:
            for needed in action.consumes(pp * vpp):
                now = elementwise_max(now, finished_at[needed])
        for action in slot:
            now = now + seconds[action.kind]
        finished_at.update((action.produces, now) for action in slot)
        rank_free_at[rank] = now
    end = rank_free_at[0]
    for free_at in rank_free_at[1:]:
        end = elementwise_max(end, free_at)
    return end - num_micro_batches * (forward_s + backward_s)


@lru_cache(maxsize=256)
def _slots_in_order(schedule: str, pp: int, vpp: int, num_micro_batches: int) -> tuple[tuple[int, Slot], ...]:
    """Return every slot with its rank, each after its dependencies."""
    return tuple(execute_order(schedule_rows(schedule, pp, vpp, num_micro_batches)))


def _interleaved_bubble_s(forward_s: Any, backward_s: Any, wgrad_s: Any, pp: int, vpp: Any, count: int) -> Any:
    """Return (pp-1)(f+b)/vpp, and (pp-n)(f+b) while a chunk waits for the last rank of the chunk before."""
    both = forward_s + backward_s
    if count >= pp:
        return (pp - 1) * both / vpp
    return both * ((pp - count) + (count - 1) / vpp)


def _zero_bubble_s(forward_s: Any, backward_s: Any, wgrad_s: Any, pp: int, vpp: Any, count: int) -> Any:
    """Return (pp-1)(f+b-2w)/vpp (ZB-H1, arXiv:2401.10241), at least a third of interleaved's.

    A rank's wait is filled with weight gradients of earlier micro-batches. With fewer than pp micro-batches it is
    either (pp-n)w longer, or the sequential time through all chunks.
    """
    both = forward_s + backward_s
    num_active = min(count, pp)
    without_wgrad = both - wgrad_s
    sequential = pp * without_wgrad + ((num_active - 1) * without_wgrad + wgrad_s) / vpp - num_active * both
    filled = (pp - 1) * elementwise_max(both - 2 * wgrad_s, both / 3) / vpp + (pp - num_active) * wgrad_s
    return elementwise_max(sequential, filled)


def _zbv_bubble_s(forward_s: Any, backward_s: Any, wgrad_s: Any, pp: int, vpp: Any, count: int) -> Any:
    """Return half of zero-bubble's at both ends, with 2*pp-1 micro-batches or more."""
    both = forward_s + backward_s
    unfilled = (pp - 1) * (both - wgrad_s)
    filled = elementwise_max(unfilled - (min(count, pp) - 1) * wgrad_s, (pp - 1) * both / 3)
    share = min(1.0, (count - 1) / (2 * pp - 2))
    return (1 - share) * unfilled + share * filled / 2


def _dualpipev_bubble_s(forward_s: Any, backward_s: Any, wgrad_s: Any, pp: int, vpp: Any, count: int) -> Any:
    """Return (pp-1)(f+2b-3w)/2."""
    return (pp - 1) * elementwise_max(forward_s + 2 * backward_s - 3 * wgrad_s, 0.0) / 2


CLOSED_FORMS: dict[str, Callable[[Any, Any, Any, int, Any, int], Any]] = {
    "gpipe": _interleaved_bubble_s,
    "1f1b": _interleaved_bubble_s,
    "interleaved": _interleaved_bubble_s,
    "zero-bubble": _zero_bubble_s,
    "zbv": _zbv_bubble_s,
    "dualpipev": _dualpipev_bubble_s,
    "csv": _interleaved_bubble_s,
}
"""Formulas by schedule, for speed: from forward, backward and wgrad seconds, pp, vpp and micro-batches. Other schedules
are executed. docs/pipeline.md has the formulas in parts of a chunk, measured."""
