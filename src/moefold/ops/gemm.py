"""GEMMs whose number of rows changes from call to call, such as the token counts of experts.

oneDNN, which torch uses on CPU for bfloat16, compiles a kernel for every new shape and caches the last 1,024. With
routed row counts nearly every call has a new shape, and compiling takes longer than multiplying: `padded_rows` rounds
the counts so that few shapes occur. MKL (called by torch.mm) does not use AVX-512 on AMD processors. There oneDNN is
the fastest float32 GEMM as well: 340 against 180 GFLOP/s for 4096 routed rows and 8 experts of [256, 512] on two
threads of a Zen 5. Elsewhere MKL is faster, compiles no kernels, and reads transposed operands at no cost. For [512,
256] x [256, 512] on one thread of a Xeon it reaches 123 against 108 GFLOP/s, and 118 against 60 with both operands
transposed. On a Zen 3 with AVX2 it reaches 91 against 78, and 89 against 76.

A processor without bfloat16 instructions emulates bfloat16 GEMMs at a tenth of the speed of float32. For [512, 256] x
[256, 512] on two threads of a Xeon with AVX-512 only, that is 13 against 130 GFLOP/s. Upcasting reaches 85. There
`matmul` upcasts its operands, multiplies in float32, which is the accumulation dtype anyway, and rounds once.
"""

from pathlib import Path

import torch
from torch import Tensor

from moefold.comm.private_torch import has_onednn_linear, onednn_linear
from moefold.config.base.loss_chunk import MIN_UPCAST_CHUNK_ROWS, NUM_UPCAST_CHUNKS

PADDED_SIZES_PER_DOUBLING = 16
"""Distinct padded row counts between n and 2n: at most 1/16 of the rows is padding, 3 % on average."""
MIN_PADDED_ROWS = 16


class Gemm:
    """GEMM backend without autograd, by torch's libraries. Subclasses are other implementations.

    A caller first asks for the expected form of the operands, then multiplies.
    """

    def is_faster_than_torch_mm(self, x: Tensor) -> bool:
        """Return whether `matmul` is faster than torch.mm for tensors such as x."""
        return is_faster_in_fp32(x) or _uses_onednn(x)

    def upcasts(self, x: Tensor) -> bool:
        """Return whether GEMMs of tensors such as x are computed, and returned, in higher precision."""
        return is_faster_in_fp32(x)

    def upcast(self, x: Tensor) -> Tensor:
        """Cast x to the dtype of its GEMMs: for callers with several GEMMs of x."""
        return x.float() if self.upcasts(x) else x

    def accepts_fp32_weight(self, x: Tensor) -> bool:
        """Return whether weights for tensors such as x may be float32, to be cast one at a time by `cast_weight`."""
        return is_faster_in_fp32(x)

    def cast_weight(self, w: Tensor, dtype: torch.dtype) -> Tensor:
        """Return a weight in the form that GEMMs read, with its values in `dtype`."""
        return self.upcast(w.to(dtype))

    def padded_rows(self, rows: int, like: Tensor) -> int:
        """Return `rows` rounded up to a count for which oneDNN caches a kernel, unchanged where oneDNN is not used."""
        uses_mkl = like.dtype == torch.float64 or (
            (like.dtype == torch.float32 or is_faster_in_fp32(like)) and not _USES_ONEDNN_FP32
        )
        if like.device.type != "cpu" or uses_mkl:
            return rows
        return round_up_rows(rows)

    def supports_out(self, x: Tensor) -> bool:
        """Return whether `matmul` of tensors such as x can write to a given output tensor."""
        return not self.is_faster_than_torch_mm(x)

    def matmul(self, x_MK: Tensor, w_NK: Tensor, out_MN: Tensor | None = None) -> Tensor:
        """Compute x @ w.T, [M, N], for w of any strides: a transposed matrix is as fast.

        Args:
            x_MK: [M, K], of the same dtype as w or `upcast` already. oneDNN copies it first if it is not contiguous.
            w_NK: [N, K], in the dtype of the result.
            out_MN: output tensor of that dtype, where `supports_out`.
        """
        if is_faster_in_fp32(w_NK):
            return _matmul_in_chunks(x_MK, w_NK, w_NK.dtype)
        if _uses_onednn(x_MK):
            return onednn_linear(x_MK, w_NK)
        return torch.mm(x_MK, w_NK.t(), out=out_MN)

    def matmul_out(self, out_MN: Tensor, x_MK: Tensor, w_NK: Tensor) -> None:
        """Write x @ w.T into `out`. Rows of x beyond the rows of `out` are padding."""
        if _supports_mm_out(out_MN, x_MK):
            torch.mm(x_MK, w_NK.t(), out=out_MN)
        else:
            out_MN.copy_(self.matmul(x_MK, w_NK)[: len(out_MN)])

    def matmul_add_out(self, out_MN: Tensor, first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor]) -> None:
        """Write the sum of two GEMMs, (x, w) of each, into `out`. It is rounded once to the dtype of `out`."""
        if _supports_mm_out(out_MN, first[0]):
            torch.mm(first[0], first[1].t(), out=out_MN)
            out_MN.addmm_(second[0], second[1].t())
        else:
            torch.add(self.matmul(*first)[: len(out_MN)], self.matmul(*second)[: len(out_MN)], out=out_MN)

    def weight_gradient(self, x_MK: Tensor, grad_MN: Tensor) -> Tensor:
        """Compute x.T @ grad, [K, N], with operands in the cheapest order. x may be `upcast` already."""
        if is_faster_in_fp32(grad_MN) or not _uses_onednn(x_MK):
            return self.matmul(x_MK.t(), grad_MN.t())
        # oneDNN needs a contiguous first operand: the smaller of the two is cheaper to transpose.
        if grad_MN.shape[1] < x_MK.shape[1]:
            return self.matmul(grad_MN.t().contiguous(), x_MK.t()).t()
        return self.matmul(x_MK.t().contiguous(), grad_MN.t())

    def weight_gradient_out(self, out_KN: Tensor, x_MK: Tensor, grad_MN: Tensor) -> None:
        """Write `weight_gradient` into `out`."""
        if _supports_mm_out(out_KN, x_MK.t()):
            torch.mm(x_MK.t(), grad_MN, out=out_KN)
        else:
            out_KN.copy_(self.weight_gradient(x_MK, grad_MN))

    def add_weight_gradient(self, out_KN: Tensor, x_MK: Tensor, grad_MN: Tensor) -> None:
        """Add `weight_gradient` to `out`."""
        if _supports_mm_out(out_KN, x_MK.t()):
            out_KN.addmm_(x_MK.t(), grad_MN)
        elif _supports_fp32_output(x_MK, grad_MN) and out_KN.dtype == torch.float32:
            torch.addmm(out_KN, x_MK.t(), grad_MN, out_dtype=torch.float32, out=out_KN)
        else:
            out_KN += self.weight_gradient(x_MK, grad_MN)

    def matmul_fp32(self, x_MK: Tensor, w_NK: Tensor) -> Tensor:
        """Compute `matmul` with a result in float32 at least. A CPU's bfloat16 instructions may round it first."""
        if _supports_fp32_output(x_MK, w_NK):
            return torch.mm(x_MK, w_NK.t(), out_dtype=torch.float32)
        is_low_precision = x_MK.element_size() < torch.float32.itemsize
        return _matmul_in_chunks(x_MK, w_NK, torch.float32) if is_low_precision else self.matmul(x_MK, w_NK)


TORCH_GEMM = Gemm()


def round_up_rows(rows: int) -> int:
    """Return the next padded row count."""
    step = max(1 << (rows.bit_length() - 1), MIN_PADDED_ROWS) // PADDED_SIZES_PER_DOUBLING
    return max(-(-rows // step) * step, MIN_PADDED_ROWS)


def is_faster_in_fp32(x: Tensor) -> bool:
    """Return whether the libraries' GEMMs of tensors such as x are faster in float32 than in their own dtype."""
    return x.dtype == torch.bfloat16 and x.device.type == "cpu" and _EMULATES_BFLOAT16


def torch_mm_is_fastest() -> bool:
    """Return whether torch.mm is the libraries' fastest float32 GEMM on this processor."""
    return not _USES_ONEDNN_FP32


def _matmul_in_chunks(x_MK: Tensor, w_NK: Tensor, dtype: torch.dtype) -> Tensor:
    """Multiply by a large w in chunks: a float32 copy of the whole weight would cost the memory that bfloat16 saves."""
    x_MK, rows = TORCH_GEMM.upcast(x_MK), max(MIN_UPCAST_CHUNK_ROWS, -(-len(w_NK) // NUM_UPCAST_CHUNKS))
    y_MN = x_MK.new_empty(len(x_MK), len(w_NK), dtype=dtype)
    for y, w in zip(y_MN.split(rows, dim=1), w_NK.split(rows), strict=True):
        TORCH_GEMM.matmul_out(y, x_MK, TORCH_GEMM.upcast(w))
    return y_MN


def _uses_onednn(x: Tensor) -> bool:
    return _USES_ONEDNN_FP32 and x.dtype == torch.float32 and x.device.type == "cpu"


def _supports_mm_out(out_MN: Tensor, x_MK: Tensor) -> bool:
    return not TORCH_GEMM.is_faster_than_torch_mm(x_MK) and out_MN.dtype == x_MK.dtype and len(out_MN) == len(x_MK)


def _supports_fp32_output(x: Tensor, w: Tensor) -> bool:
    """Return whether torch's GEMM of two 16-bit operands can return its float32 accumulator: not on a CPU."""
    return x.device.type != "cpu" and x.dtype == w.dtype and x.dtype in (torch.bfloat16, torch.float16)


def _has_onednn_linear() -> bool:
    """Return whether torch has the oneDNN linear operation that its compiler uses on x86."""
    return (
        torch.backends.mkldnn.is_available()
        and torch.backends.cpu.get_cpu_capability().startswith("AVX")
        and has_onednn_linear()
    )


def _mkl_uses_widest_simd() -> bool:
    """Return whether MKL uses the widest SIMD: it uses AVX-512 only on Intel processors, identified on Linux only."""
    if torch.backends.cpu.get_cpu_capability() != "AVX512":
        return True
    cpuinfo = Path("/proc/cpuinfo")
    return cpuinfo.exists() and "GenuineIntel" in cpuinfo.read_text(encoding="ascii", errors="replace")


def _emulates_bfloat16() -> bool:
    """Return whether this is an x86 processor without bfloat16 dot products."""
    checks = [getattr(torch.cpu, name, None) for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported")]
    is_x86 = torch.backends.cpu.get_cpu_capability().startswith("AVX")
    return is_x86 and all(checks) and not any(is_supported() for is_supported in checks if is_supported is not None)


_USES_ONEDNN_FP32 = _has_onednn_linear() and not (torch.backends.mkl.is_available() and _mkl_uses_widest_simd())
"""True if float32 is multiplied by oneDNN rather than by the library of torch.mm."""
_EMULATES_BFLOAT16 = _emulates_bfloat16()
