"""Matrix products on a CPU, in C, of any row count, strides and mix of float32 and bfloat16; a `model.gemm.Gemm`.

What makes it worth having is not its rate, which is that of the libraries: every product goes where its result belongs,
rows need no padding, transposed operands no copy, and weights no copy in another type, as all that happens where
operands are packed anyway. No bit of a result depends on the number of threads or, if rows are not few, on other rows.
"""

import ctypes
import struct
import threading
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from moefold.comm.torch_compat import has_amx_tiles
from moefold.ops.cpu.build import CompilerError, load_library
from moefold.ops.gemm import Gemm, is_faster_in_fp32, torch_mm_is_fastest

DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1}
"""What numbers are in memory, as in `product.c`."""
MIN_FAST_VECTOR_WIDTH = 8
"""Numbers of a vector from which it is as fast as the libraries: those of AVX."""
MIN_PACKED_ROWS = {torch.float32: 32, torch.bfloat16: 64}
"""Rows below which an operand is read once and packing costs more than the product: tokens that are decoded."""
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
"""Of the trial, relative to the largest value: what is wrong is wrong by more."""
CACHE_LINE_WORDS = 16
"""Words of a line of the cache, at which panels begin."""
SELF_TEST_SHAPE = (37, 41, 75)
"""Rows, columns and depth of the trial: what vectors and panels do not divide."""
GEMM_ARGS, GEMM_TERM = struct.Struct("P7qPq"), struct.Struct("P3qP4q")
"""`job` of the source, and each `term` behind it."""
MatmulOperands = tuple[Tensor, Tensor]
"""x [M, K] and w [N, K] of a product x @ w.T."""


class CGemm(Gemm):
    """Products in C. Where an operand is bfloat16, all are read with the values that they have in it.

    Other types and devices are multiplied by the libraries.

    Raises:
        CompilerError: it cannot be built here.
    """

    def __init__(self) -> None:
        library = load_library("gemm")
        self._gemm, self._scratch_words = library.product, library.product_scratch
        self._gemm.argtypes, self._gemm.restype = [ctypes.c_char_p], None
        self._scratch_words.argtypes, self._scratch_words.restype = (
            [*[ctypes.c_int64] * 3, ctypes.c_int],
            ctypes.c_int64,
        )
        self._vector_width: int = library.product_vector()
        self._scratch_buffers = threading.local()
        self._self_test()

    def is_fast(self, dtype: torch.dtype) -> bool:
        """Whether it beats the libraries on this processor in this type, by what they leave unused there.

        In float32 they are at least as good where their own instructions are all used and nothing has to be copied. In
        bfloat16 a processor may multiply whole tiles (AMX), which this does not.
        """
        if self._vector_width < MIN_FAST_VECTOR_WIDTH or dtype not in DTYPE_CODES:
            return False
        return not torch_mm_is_fastest() if dtype == torch.float32 else not has_amx_tiles()

    def is_faster_than_torch_mm(self, x: Tensor) -> bool:
        """See `Gemm`."""
        return _is_supported_tensor(x) or super().is_faster_than_torch_mm(x)

    def upcasts(self, x: Tensor) -> bool:
        """See `Gemm`."""
        return not self.is_faster_than_torch_mm(x) and super().upcasts(x)

    def accepts_fp32_weight(self, x: Tensor) -> bool:
        """See `Gemm`."""
        return x.dtype == torch.bfloat16 and self.is_faster_than_torch_mm(x)

    def supports_out(self, x: Tensor) -> bool:
        """See `Gemm`."""
        return _is_supported_tensor(x) or super().supports_out(x)

    def padded_rows(self, rows: int, like: Tensor) -> int:
        """See `Gemm`."""
        return rows if _is_supported_tensor(like) else super().padded_rows(rows, like)

    def cast_weight(self, w: Tensor, dtype: torch.dtype) -> Tensor:
        """See `Gemm`; what is rounded as it is packed stays as it is."""
        return w if w.dtype in DTYPE_CODES and dtype == torch.bfloat16 else super().cast_weight(w, dtype)

    def matmul(self, x_MK: Tensor, w_NK: Tensor, out_MN: Tensor | None = None) -> Tensor:
        """See `Gemm`; the result is bfloat16 if an operand is."""
        if not _supports(x_MK, w_NK):
            return super().matmul(x_MK, w_NK, out_MN)
        if _prefers_torch_mm(x_MK, w_NK, out_MN):
            return torch.mm(x_MK, w_NK.t(), out=out_MN)
        dtype = torch.bfloat16 if torch.bfloat16 in (x_MK.dtype, w_NK.dtype) else torch.float32
        out = x_MK.new_empty(len(x_MK), len(w_NK), dtype=dtype) if out_MN is None else out_MN
        self._multiply(out, [(x_MK, w_NK)])
        return out

    def matmul_out(self, out_MN: Tensor, x_MK: Tensor, w_NK: Tensor) -> None:
        """See `Gemm`."""
        if _supports(x_MK, w_NK) and _is_supported_output(out_MN):
            if _prefers_torch_mm(x_MK, w_NK, out_MN):
                torch.mm(x_MK[: len(out_MN)], w_NK.t(), out=out_MN)
            else:
                self._multiply(out_MN, [(x_MK, w_NK)])
        elif _supports(x_MK, w_NK):
            out_MN.copy_(self.matmul(x_MK[: len(out_MN)], w_NK))
        else:
            super().matmul_out(out_MN, x_MK, w_NK)

    def matmul_add_out(self, out_MN: Tensor, first: MatmulOperands, second: MatmulOperands) -> None:
        """See `Gemm`."""
        if _supports(*first, *second) and _is_supported_output(out_MN):
            self._multiply(out_MN, [first, second])
        elif _supports(*first, *second):
            summed = torch.empty_like(out_MN, memory_format=torch.contiguous_format)
            self._multiply(summed, [first, second])
            out_MN.copy_(summed)
        else:
            super().matmul_add_out(out_MN, first, second)

    def weight_gradient(self, x_MK: Tensor, grad_MN: Tensor) -> Tensor:
        """See `Gemm`."""
        return self.matmul(x_MK.t(), grad_MN.t())

    def weight_gradient_out(self, out_KN: Tensor, x_MK: Tensor, grad_MN: Tensor) -> None:
        """See `Gemm`."""
        self.matmul_out(out_KN, x_MK.t(), grad_MN.t())

    def add_weight_gradient(self, out_KN: Tensor, x_MK: Tensor, grad_MN: Tensor) -> None:
        """See `Gemm`."""
        if _supports(x_MK, grad_MN) and _is_supported_output(out_KN):
            self._multiply(out_KN, [(x_MK.t(), grad_MN.t())], accumulates=True)
        elif _supports(x_MK, grad_MN):
            out_KN += self.matmul_fp32(x_MK.t(), grad_MN.t())
        else:
            super().add_weight_gradient(out_KN, x_MK, grad_MN)

    def matmul_fp32(self, x_MK: Tensor, w_NK: Tensor) -> Tensor:
        """See `Gemm`."""
        if not _supports(x_MK, w_NK):
            return super().matmul_fp32(x_MK, w_NK)
        return self.matmul(x_MK, w_NK, x_MK.new_empty(len(x_MK), len(w_NK), dtype=torch.float32))

    def _multiply(self, out: Tensor, pairs: Sequence[MatmulOperands], *, accumulates: bool = False) -> None:
        rows, columns = out.shape
        for x, w in pairs:
            # What is compiled reads on where an operand ends.
            assert x.shape[0] >= rows, (out.shape, x.shape)
            assert w.shape == (columns, x.shape[1]), (out.shape, x.shape, w.shape)
        if rows == 0 or columns == 0:
            return
        is_narrow, depth, terms = False, 0, b""
        for x, w in pairs:
            is_narrow = is_narrow or torch.bfloat16 in (x.dtype, w.dtype)
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
        room = self._scratch_address(self._scratch_words(rows, columns, depth, threads))
        target = (out.data_ptr(), out.stride(0), DTYPE_CODES[out.dtype], accumulates)
        self._gemm(GEMM_ARGS.pack(*target, rows, columns, is_narrow, threads, room, len(pairs)) + terms)

    def _scratch_address(self, num_words: int) -> int:
        """The address of scratch memory, this thread's own; kept, as to touch new memory costs more than to pack.

        It is no tensor, so that who counts those of a layer does not find it there.
        """
        if getattr(self._scratch_buffers, "words", -1) < num_words:
            array = self._scratch_buffers.array = np.empty(num_words + CACHE_LINE_WORDS, np.int32)
            self._scratch_buffers.words = num_words
            self._scratch_buffers.address = array.ctypes.data + -array.ctypes.data % (CACHE_LINE_WORDS * array.itemsize)
        address: int = self._scratch_buffers.address
        return address

    def _self_test(self) -> None:
        """Compare with float64, so that a compiler that errs is found out before a run is.

        Raises:
            CompilerError: it differs.
        """
        rows, columns, depth = SELF_TEST_SHAPE
        x, w = (torch.linspace(low, 9, n * depth).sin().view(n, depth) for low, n in ((-7, rows), (2, columns)))
        for dtype, error in TOLERANCES.items():
            a, b = x.to(dtype), w.to(dtype)
            right = a.double() @ b.double().t()
            for left, other in ((a, b), (a.t().contiguous().t(), b.t().contiguous().t()), (a, b.float())):
                found = torch.full((rows, columns), float("nan"))
                self.matmul_out(found, left, other)
                self.add_weight_gradient(found, left.t(), other.t())
                if not (found.double() - 2 * right).abs().max() <= error * right.abs().max():
                    raise CompilerError(f"what the compiler built of products is wrong in {dtype}")


def _is_supported_tensor(x: Tensor) -> bool:
    """Whether memory is a CPU's, with numbers that it knows."""
    return x.is_cpu and x.dtype in DTYPE_CODES


def _supports(*operands: Tensor) -> bool:
    return all(_is_supported_tensor(x) and x.dim() == 2 for x in operands)


def _prefers_torch_mm(x_MK: Tensor, w_NK: Tensor, out: Tensor | None) -> bool:
    """Whether torch.mm is faster for so few rows; it reads and writes one type."""
    if x_MK.shape[0] >= MIN_PACKED_ROWS[x_MK.dtype]:
        return False
    dtypes = {x_MK.dtype, w_NK.dtype, x_MK.dtype if out is None else out.dtype}
    return len(dtypes) == 1 and not is_faster_in_fp32(x_MK)


def _is_supported_output(out: Tensor) -> bool:
    return _is_supported_tensor(out) and (out.stride(1) == 1 or out.shape[1] == 1)
