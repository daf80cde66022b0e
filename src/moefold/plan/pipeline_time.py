"""Length of a step's pipeline in closed form, by schedule. Torch-free; the simulator plays the same schedules out."""

from typing import Any

import numpy as np


def bubble_s(forward_s: Any, backward_s: Any, weight_s: Any, *, pp: int, vpp: Any, schedule: str) -> Any:
    """Idle seconds of a rank in one step.

    Args:
        forward_s: a number, or an array as all that is measured may be: one micro-batch through all chunks of one rank.
        backward_s: the same backward, weights' gradients included.
        weight_s: the part of `backward_s` that makes weights' gradients.
        pp: pipeline ranks.
        vpp: chunks on each rank.
        schedule: as in a recipe; "1f1b" with vpp of 2 or more is the interleaved form (arXiv:2104.04473).

    Returns:
        gpipe and 1f1b: (pp-1)(f+b). interleaved: the same over vpp. zero-bubble (ZB-H1, arXiv:2401.10241) fills a
        rank's wait with weights' gradients: (pp-1)(f + b - 2w), at least a third of 1F1B's. zbv: half as long a way in
        and out again. dualpipev: (pp-1)(f + 2b - 3w)/2. docs/pipeline.md has the same in parts of a chunk, measured.
    """
    if pp == 1:
        return 0.0
    both = forward_s + backward_s
    if schedule in ("zero-bubble", "zbv"):
        filled = larger(both - 2 * weight_s, both / 3)
        return (pp - 1) * filled / (2 if schedule == "zbv" else 1)
    if schedule == "dualpipev":
        return (pp - 1) * larger(forward_s + 2 * backward_s - 3 * weight_s, 0.0) / 2
    return (pp - 1) * both / vpp


def larger(left: Any, right: Any) -> Any:
    """The larger of two numbers, or of each pair of two arrays."""
    return (
        np.maximum(left, right) if isinstance(left, np.ndarray) or isinstance(right, np.ndarray) else max(left, right)
    )
