"""Matrix products whose number of rows changes from call to call, as routing makes it.

oneDNN, which torch uses on CPU for bfloat16, compiles a kernel for every shape it meets and keeps the last 1,024. With
routed row counts nearly every call meets a new shape, and compiling takes longer than multiplying: `padded_rows` rounds
the counts so that few shapes occur. oneDNN then is the fastest float32 product as well: torch.mm calls MKL, which
reaches half of its speed on AMD processors (180 against 340 GFLOP/s: 4096 routed rows, 8 experts of [256, 512], two
threads of a Zen 5).

A processor without instructions for bfloat16 emulates its products at a tenth of the speed of float32: 13 against 130
GFLOP/s ([512, 256] x [256, 512], two threads of a Xeon with AVX-512 alone, where widening reaches 85). There `product`
widens its operands, multiplies in float32, as the accumulation is anyway, and rounds once.
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
    is_float32 = x.dtype == torch.float32 or multiplies_wide(x)
    return is_float32 and x.device.type == "cpu" and _HAS_ONEDNN_LINEAR


def multiplies_wide(x: Tensor) -> bool:
    """Whether products of tensors such as x are faster in float32 than in their own type."""
    return x.dtype == torch.bfloat16 and x.device.type == "cpu" and _EMULATES_BFLOAT16


def widened(x: Tensor) -> Tensor:
    """The same values in the type that their products are taken in: a caller with several products widens once."""
    return x.float() if multiplies_wide(x) else x


def product(x_MK: Tensor, w_NK: Tensor) -> Tensor:
    """The product x @ w.T, [M, N], without autograd; w may have any strides, a transposed one is as fast.

    Args:
        x_MK: [M, K]; copied first if not contiguous.
        w_NK: [N, K], of the same type.
    """
    if multiplies_wide(x_MK):
        return product(widened(x_MK), widened(w_NK)).to(x_MK.dtype)
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


def _emulates_bfloat16() -> bool:
    """Whether this is an x86 processor without dot products of bfloat16."""
    known = [getattr(torch.cpu, name, None) for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported")]
    is_x86 = torch.backends.cpu.get_cpu_capability().startswith("AVX")
    return is_x86 and all(known) and not any(has() for has in known if has is not None)


_HAS_ONEDNN_LINEAR = _has_onednn_linear()
_EMULATES_BFLOAT16 = _emulates_bfloat16()
