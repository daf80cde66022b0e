"""Matrix products whose number of rows changes from call to call, as routing makes it.

oneDNN, which torch uses on CPU for bfloat16, compiles a kernel for every shape it meets and keeps the last 1,024. With
routed row counts nearly every call meets a new shape, and compiling takes longer than multiplying: `padded_rows` rounds
the counts so that few shapes occur. oneDNN then is the fastest float32 product as well: torch.mm calls MKL, which
reaches half of its speed on AMD processors (180 against 340 GFLOP/s: 4096 routed rows, 8 experts of [256, 512], two
threads of a Zen 5).
"""

import torch
from torch import Tensor

STEPS_PER_OCTAVE = 16
"""Distinct padded row counts between n and 2n: at most 1/16 of the rows is padding, 3 % on average."""
LEAST_ROWS = 16


def padded_rows(rows: int, like: Tensor) -> int:
    """`rows`, rounded up to a number of rows for which a kernel is kept; unchanged where products are not by oneDNN."""
    if like.device.type != "cpu" or like.dtype == torch.float64:
        return rows
    step = max(1 << (rows.bit_length() - 1), LEAST_ROWS) // STEPS_PER_OCTAVE
    return max(-(-rows // step) * step, LEAST_ROWS)


def has_fast_product(x: Tensor) -> bool:
    """Whether `product` beats torch.mm for tensors such as x."""
    return x.dtype == torch.float32 and x.device.type == "cpu" and _HAS_ONEDNN_LINEAR


def product(x_MK: Tensor, w_NK: Tensor) -> Tensor:
    """The product x @ w.T, [M, N], without autograd; w may have any strides, a transposed one is as fast.

    Args:
        x_MK: [M, K]; copied first if not contiguous.
        w_NK: [N, K], of the same type.
    """
    if has_fast_product(x_MK):
        y_MN: Tensor = torch.ops.mkldnn._linear_pointwise(x_MK, w_NK, None, "none", [], "")
        return y_MN
    return torch.mm(x_MK, w_NK.t())


def _has_onednn_linear() -> bool:
    """Whether torch has the product that its compiler uses for linear layers on x86."""
    return (
        torch.backends.mkldnn.is_available()
        and torch.backends.cpu.get_cpu_capability().startswith("AVX")
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )


_HAS_ONEDNN_LINEAR = _has_onednn_linear()
