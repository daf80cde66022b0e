"""Exact top-k by guess, verify and refine: the positions of the k largest scores of each row.

`sorted_topk` is the definition. On CPUs with a compiler the C kernel runs (`ops/cpu/exact_topk.py`), on CUDA in float32
and bfloat16 the Triton kernel (`ops/triton/exact_topk.py`). All results are equal (docs/design/033-exact-top-k.md).
"""

from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moefold.comm.private_torch import assert_on_device

if TYPE_CHECKING:
    from moefold.ops.cpu.exact_topk import CExactTopk

DTYPES = (torch.float32, torch.bfloat16, torch.float64)
NAN_MESSAGE = "scores of exact_topk have NaN, which has no order; look for the operation that produced it"


def exact_topk(
    scores: Tensor, k: int, *, starts: Tensor | None = None, stops: Tensor | None = None, guess: Tensor | None = None
) -> Tensor:
    """Select the k largest scores of each row among its positions starts[r] <= n < stops[r].

    Among equal scores the lowest position is selected. -0.0 equals 0.0, and -inf and +inf are ordinary scores. The
    result equals the result of a full sort. No gradient flows.

    Args:
        scores: [R, N], float32, bfloat16 or float64. Values outside of a row's positions are not read.
        k: number of positions to select, at least 1. It may exceed N.
        starts: first position of each row, int32 [R]. None means 0. Clamped to [0, N].
        stops: position after the last of each row, int32 [R]. None: N. Clamped to [0, N]. At or below its start, the
            row has no positions.
        guess: positions that probably are in the result, int32 [R, G], such as the result of the previous row or step.
            It saves time and never changes the result. Any content is legal: repeated positions, and positions out of
            range.

    Returns:
        Selected positions in ascending order, int32 [R, k], then -1 where a row has fewer than k positions.

    Raises:
        ValueError: wrong shapes or dtypes, or a row's scores contain NaN. On CUDA, where the host does not wait for the
            check, NaN is a device-side assertion instead.
    """
    _check_arguments(scores, k, starts, stops, guess)
    scores = scores.detach()
    if scores.is_meta and not scores.is_cuda:
        return scores.new_empty(len(scores), k, dtype=torch.int32)
    if scores.is_cuda and scores.dtype != torch.float64 and find_spec("triton") is not None:
        from moefold.ops.triton.exact_topk import triton_exact_topk

        positions, has_nan_R = triton_exact_topk(scores, k, starts, stops, guess)
        assert_on_device(~has_nan_R.any(), NAN_MESSAGE)
        return positions
    kernel = c_kernel() if scores.is_cpu else None
    if kernel is None:
        return sorted_topk(scores, k, starts=starts, stops=stops)
    positions, rows_with_nan = kernel(scores, k, starts, stops, guess)
    if rows_with_nan:
        raise ValueError(f"{NAN_MESSAGE} ({rows_with_nan} of {len(scores)} rows)")
    return positions


def sorted_topk(scores: Tensor, k: int, *, starts: Tensor | None = None, stops: Tensor | None = None) -> Tensor:
    """Select as `exact_topk` does, by two stable sorts of each row, which are the definition of the result.

    Raises:
        ValueError: a row's scores contain NaN (on CUDA a device-side assertion).
    """
    rows, width = scores.shape
    position_N = torch.arange(width, device=scores.device)
    is_legal = torch.ones(rows, width, dtype=torch.bool, device=scores.device)
    if starts is not None:
        is_legal &= position_N >= starts[:, None]
    if stops is not None:
        is_legal &= position_N < stops[:, None]
    has_nan = (scores.isnan() & is_legal).any()
    if scores.is_cuda:
        assert_on_device(~has_nan, NAN_MESSAGE)
    elif has_nan:
        raise ValueError(NAN_MESSAGE)
    # Adding 0.0 turns -0.0 into 0.0: a sort by bits would distinguish them.
    order = (scores + 0.0).argsort(dim=1, descending=True, stable=True)
    illegal_last = is_legal.gather(1, order).logical_not().to(torch.uint8).argsort(dim=1, stable=True)
    selected = order.gather(1, illegal_last)[:, :k]
    selected = selected.masked_fill(~is_legal.gather(1, selected), width).sort(dim=1).values
    out = scores.new_full((rows, k), -1, dtype=torch.int32)
    out[:, : selected.shape[1]] = selected.masked_fill(selected == width, -1)
    return out


def _check_arguments(scores: Tensor, k: int, starts: Tensor | None, stops: Tensor | None, guess: Tensor | None) -> None:
    if scores.dim() != 2 or scores.dtype not in DTYPES:
        raise ValueError(
            f"scores of exact_topk are {scores.dtype} of shape {list(scores.shape)}; "
            "they must be [R, N] of float32, bfloat16 or float64"
        )
    if k < 1:
        raise ValueError(f"k={k} of exact_topk must be at least 1")
    if scores.shape[1] >= 2**31:
        raise ValueError(f"rows of exact_topk have {scores.shape[1]} scores; positions are int32, so at most 2**31 - 1")
    tensors = {"starts": (starts, 1), "stops": (stops, 1), "guess": (guess, 2)}
    for name, (tensor, dims) in tensors.items():
        if tensor is None:
            continue
        if tensor.dtype != torch.int32 or tensor.dim() != dims or len(tensor) != len(scores):
            raise ValueError(
                f"{name} of exact_topk is {tensor.dtype} of shape {list(tensor.shape)}; "
                f"it must be int32 with {dims} dims and a row for each of the {len(scores)} rows of scores"
            )
        if tensor.device != scores.device:
            raise ValueError(f"{name} of exact_topk is on {tensor.device}, and scores are on {scores.device}")


@cache
def c_kernel() -> "CExactTopk | None":
    """Return the C kernel, or None without a working compiler."""
    from moefold.ops.cpu.build import CompilerError, build_libraries
    from moefold.ops.cpu.exact_topk import CExactTopk

    try:
        # One process of each machine compiles.
        build_libraries("exact_topk")
        return CExactTopk()
    except CompilerError:
        return None
