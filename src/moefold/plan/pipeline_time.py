"""Length of a step's pipeline in closed form, by schedule. Torch-free; the simulator plays the same schedules out."""

from typing import Any

import numpy as np


def bubble_s(
    forward_s: Any, backward_s: Any, wgrad_s: Any, *, pp: int, vpp: Any, num_micro_batches: int, schedule: str
) -> Any:
    """Idle seconds of a rank in one step.

    Args:
        forward_s: a number, or an array as all that is measured may be: one micro-batch through all chunks of one rank.
        backward_s: the same backward, weights' gradients included.
        wgrad_s: the part of `backward_s` that makes weights' gradients.
        pp: pipeline ranks.
        vpp: chunks on each rank.
        num_micro_batches: micro-batches of a step. With fewer than pp no schedule keeps all ranks busy: one goes from rank to rank.
        schedule: as in a recipe; "1f1b" with vpp of 2 or more is the interleaved form (arXiv:2104.04473).

    Returns:
        gpipe and 1f1b: (pp-1)(f+b). interleaved: the same over vpp, and (pp-n)(f+b) while a chunk waits for the last
        rank of the chunk before. zero-bubble (ZB-H1, arXiv:2401.10241) fills a rank's wait with weights' gradients of
        the micro-batches behind it: (pp-1)(f + b - 2w) over vpp, at least a third of interleaved's; with fewer than pp
        micro-batches either (pp-n)w more, or what one after the other takes through all chunks. zbv: half as long a way
        in and out again, with 2*pp-1 micro-batches or more. dualpipev: (pp-1)(f + 2b - 3w)/2. docs/pipeline.md has the
        same in parts of a chunk, measured.
    """
    if pp == 1:
        return 0.0
    both = forward_s + backward_s
    if schedule == "zero-bubble":
        few, without = min(num_micro_batches, pp), both - wgrad_s
        in_turn = pp * without + ((few - 1) * without + wgrad_s) / vpp - few * both
        filled = (pp - 1) * elementwise_max(both - 2 * wgrad_s, both / 3) / vpp + (pp - few) * wgrad_s
        return elementwise_max(in_turn, filled)
    if schedule == "zbv":
        alone = (pp - 1) * (both - wgrad_s)
        filled = elementwise_max(alone - (min(num_micro_batches, pp) - 1) * wgrad_s, (pp - 1) * both / 3)
        share = min(1.0, (num_micro_batches - 1) / (2 * pp - 2))
        return (1 - share) * alone + share * filled / 2
    if schedule == "dualpipev":
        return (pp - 1) * elementwise_max(forward_s + 2 * backward_s - 3 * wgrad_s, 0.0) / 2
    if schedule == "gpipe" or num_micro_batches >= pp:
        return (pp - 1) * both / vpp
    return both * ((pp - num_micro_batches) + (num_micro_batches - 1) / vpp)


def elementwise_max(left: Any, right: Any) -> Any:
    """The larger of two numbers, or of each pair of two arrays."""
    return (
        np.maximum(left, right) if isinstance(left, np.ndarray) or isinstance(right, np.ndarray) else max(left, right)
    )
