"""`ops.gemm.Gemm` on a CPU in C, for any row count, strides and mix of float32 and bfloat16.

It is as fast as the libraries. Its advantage: it writes into any output, and needs no padded rows, copies of transposed
operands or cast copies of weights, because it pads, transposes and casts while packing operands. Results are bitwise
independent of the number of threads and of the other rows: a token has the same bits in training and in decoding.
"""

import ctypes
import struct
import threading
from collections.abc import Sequence
from itertools import product

import numpy as np
import torch
from torch import Tensor

from moefold.comm.private_torch import has_amx_tiles
from moefold.ops.cpu.build import NUMBER, SIZE, CompilerError, declare, load_library
from moefold.ops.gemm import Gemm, torch_mm_is_fastest

DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1}
"""Numbers of the dtypes in `gemm.c`."""
MIN_FAST_VECTOR_WIDTH = 8
"""Smallest vector, in floats, for which the GEMM is as fast as the libraries: AVX."""
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
"""Tolerances of the self-test, relative to the largest value. A miscompiled kernel differs by more."""
CACHE_LINE_WORDS = 16
"""Words of a cache line. Panels are aligned to it."""
SELF_TEST_SHAPES = ((37, 41, 75), (3, 64, 528))
"""Rows, columns and depth of the self-test: not multiples of vectors and panels, and few rows, as in decoding."""
GEMM_ARGS = struct.Struct("P7qPq")
GEMM_TERM = struct.Struct("P3qP4q")
"""C structs `gemm_args`, and each `gemm_term` after it."""
MatmulOperands = tuple[Tensor, Tensor]
"""x [M, K] and w [N, K] of a product x @ w.T."""


class CGemm(Gemm):
    """GEMM backend in C. If an operand is bfloat16, all operands are rounded to it.

    Other dtypes and devices are multiplied by the libraries.
    """

    def __init__(self) -> None:
        library = load_library("gemm")
        self._gemm = declare(library.gemm, ctypes.c_char_p)
        self._scratch_words = declare(library.gemm_scratch_words, *[SIZE] * 3, NUMBER, result=SIZE)
        self._vector_width: int = library.gemm_vector_width()
        self._scratch_buffers = threading.local()
        self._self_test()

    def is_fast(self, dtype: torch.dtype) -> bool:
        """Return whether this GEMM is faster than the libraries on this processor in this dtype.

        In float32 the libraries are at least as fast if they use all of the processor's instructions and need no
        copies. In bfloat16 a processor may have tile instructions (AMX), which this GEMM does not use.
        """
        if self._vector_width < MIN_FAST_VECTOR_WIDTH or dtype not in DTYPE_CODES:
            return False
        return not torch_mm_is_fastest() if dtype == torch.float32 else not has_amx_tiles()

    def is_faster_than_torch_mm(self, x: Tensor) -> bool:
        """See base class."""
        return _is_supported_tensor(x) or super().is_faster_than_torch_mm(x)

    def upcasts(self, x: Tensor) -> bool:
        """See base class."""
        return not self.is_faster_than_torch_mm(x) and super().upcasts(x)

    def accepts_fp32_weight(self, x: Tensor) -> bool:
        """See base class."""
        return x.dtype == torch.bfloat16 and self.is_faster_than_torch_mm(x)

    def supports_out(self, x: Tensor) -> bool:
        """See base class."""
        return _is_supported_tensor(x) or super().supports_out(x)

    def padded_rows(self, rows: int, like: Tensor) -> int:
        """See base class."""
        return rows if _is_supported_tensor(like) else super().padded_rows(rows, like)

    def cast_weight(self, w: Tensor, dtype: torch.dtype) -> Tensor:
        """See `Gemm`. Weights that are rounded while packing are returned unchanged."""
        return w if w.dtype in DTYPE_CODES and dtype == torch.bfloat16 else super().cast_weight(w, dtype)

    def matmul(self, x_MK: Tensor, w_NK: Tensor, out_MN: Tensor | None = None) -> Tensor:
        """See `Gemm`. The result is bfloat16 if an operand is."""
        if not _supports(x_MK, w_NK):
            return super().matmul(x_MK, w_NK, out_MN)
        dtype = torch.bfloat16 if torch.bfloat16 in (x_MK.dtype, w_NK.dtype) else torch.float32
        out = x_MK.new_empty(len(x_MK), len(w_NK), dtype=dtype) if out_MN is None else out_MN
        self._multiply(out, [(x_MK, w_NK)])
        return out

    def matmul_out(self, out_MN: Tensor, x_MK: Tensor, w_NK: Tensor) -> None:
        """See base class."""
        if _supports(x_MK, w_NK) and _is_supported_output(out_MN):
            self._multiply(out_MN, [(x_MK, w_NK)])
        elif _supports(x_MK, w_NK):
            out_MN.copy_(self.matmul(x_MK[: len(out_MN)], w_NK))
        else:
            super().matmul_out(out_MN, x_MK, w_NK)

    def matmul_add_out(self, out_MN: Tensor, first: MatmulOperands, second: MatmulOperands) -> None:
        """See base class."""
        if _supports(*first, *second) and _is_supported_output(out_MN):
            self._multiply(out_MN, [first, second])
        elif _supports(*first, *second):
            summed = torch.empty_like(out_MN, memory_format=torch.contiguous_format)
            self._multiply(summed, [first, second])
            out_MN.copy_(summed)
        else:
            super().matmul_add_out(out_MN, first, second)

    def weight_gradient(self, x_MK: Tensor, grad_MN: Tensor) -> Tensor:
        """See base class."""
        return self.matmul(x_MK.t(), grad_MN.t())

    def weight_gradient_out(self, out_KN: Tensor, x_MK: Tensor, grad_MN: Tensor) -> None:
        """See base class."""
        self.matmul_out(out_KN, x_MK.t(), grad_MN.t())

    def add_weight_gradient(self, out_KN: Tensor, x_MK: Tensor, grad_MN: Tensor) -> None:
        """See base class."""
        if _supports(x_MK, grad_MN) and _is_supported_output(out_KN):
            self._multiply(out_KN, [(x_MK.t(), grad_MN.t())], accumulates=True)
        elif _supports(x_MK, grad_MN):
            out_KN += self.matmul_fp32(x_MK.t(), grad_MN.t())
        else:
            super().add_weight_gradient(out_KN, x_MK, grad_MN)

    def matmul_fp32(self, x_MK: Tensor, w_NK: Tensor) -> Tensor:
        """See base class."""
        if not _supports(x_MK, w_NK):
            return super().matmul_fp32(x_MK, w_NK)
        return self.matmul(x_MK, w_NK, x_MK.new_empty(len(x_MK), len(w_NK), dtype=torch.float32))

    def _multiply(self, out: Tensor, pairs: Sequence[MatmulOperands], *, accumulates: bool = False) -> None:
        rows, columns = out.shape
        for x, w in pairs:
            # The C code has no bounds checks.
            assert x.shape[0] >= rows, (out.shape, x.shape)
            assert w.shape == (columns, x.shape[1]), (out.shape, x.shape, w.shape)
        if rows == 0 or columns == 0:
            return
        rounds_to_bfloat16 = False
        depth = 0
        terms = b""
        for x, w in pairs:
            rounds_to_bfloat16 = rounds_to_bfloat16 or torch.bfloat16 in (x.dtype, w.dtype)
            depth += x.shape[1]
            terms += GEMM_TERM.pack(
                x.data_ptr(),
                *x.stride(),
                DTYPE_CODES[x.dtype],
                w.data_ptr(),
                *w.stride(),
                DTYPE_CODES[w.dtype],
                x.shape[1],
            )
        threads = torch.get_num_threads()
        scratch = self._scratch_address(self._scratch_words(rows, columns, depth, threads))
        target = (out.data_ptr(), out.stride(0), DTYPE_CODES[out.dtype], accumulates)
        self._gemm(GEMM_ARGS.pack(*target, rows, columns, rounds_to_bfloat16, threads, scratch, len(pairs)) + terms)

    def _scratch_address(self, num_words: int) -> int:
        """Return the address of this thread's scratch memory, which is reused: page faults cost more than packing.

        It is not a tensor, so that memory accounting of layers does not count it.
        """
        if getattr(self._scratch_buffers, "words", -1) < num_words:
            array = self._scratch_buffers.array = np.empty(num_words + CACHE_LINE_WORDS, np.int32)
            self._scratch_buffers.words = num_words
            self._scratch_buffers.address = array.ctypes.data + -array.ctypes.data % (CACHE_LINE_WORDS * array.itemsize)
        return self._scratch_buffers.address

    def _self_test(self) -> None:
        """Compare with float64.

        Raises:
            CompilerError: results differ.
        """
        for dtype, (rows, columns, depth) in product(TOLERANCES, SELF_TEST_SHAPES):
            x, w = (torch.linspace(low, 9, n * depth).sin().view(n, depth) for low, n in ((-7, rows), (2, columns)))
            a = x.to(dtype)
            b = w.to(dtype)
            expected = a.double() @ b.double().t()
            for first, second in ((a, b), (a, b.t().contiguous().t()), (a.t().contiguous().t(), b), (a, b.float())):
                actual = torch.full((rows, columns), float("nan"))
                self.matmul_out(actual, first, second)
                self.add_weight_gradient(actual, first.t(), second.t())
                if not (actual.double() - 2 * expected).abs().max() <= TOLERANCES[dtype] * expected.abs().max():
                    raise CompilerError(f"the compiled GEMM kernel is wrong in {dtype}")


def _is_supported_tensor(x: Tensor) -> bool:
    """Return whether a tensor is on the CPU and of a supported dtype."""
    return x.is_cpu and x.dtype in DTYPE_CODES


def _supports(*operands: Tensor) -> bool:
    return all(_is_supported_tensor(x) and x.dim() == 2 for x in operands)


def _is_supported_output(out: Tensor) -> bool:
    return _is_supported_tensor(out) and (out.stride(1) == 1 or out.shape[1] == 1)
