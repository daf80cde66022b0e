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

from moefold.kernels.c_library import CompilerError, c_library
from moefold.model.gemm import Gemm, libraries_use_all, multiplies_wide

KINDS = {torch.float32: 0, torch.bfloat16: 1}
"""What numbers are in memory, as in `product.c`."""
FAST_VECTOR = 8
"""Numbers of a vector from which it is as fast as the libraries: those of AVX."""
FEW_ROWS = {torch.float32: 32, torch.bfloat16: 64}
"""Rows below which an operand is read once and packing costs more than the product: tokens that are decoded."""
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
"""Of the trial, relative to the largest value: what is wrong is wrong by more."""
LINE = 16
"""Words of a line of the cache, at which panels begin."""
PROBE = (37, 41, 75)
"""Rows, columns and depth of the trial: what vectors and panels do not divide."""
JOB, TERM = struct.Struct("P7qPq"), struct.Struct("P3qP4q")
"""`job` of the source, and each `term` behind it."""
Pair = tuple[Tensor, Tensor]
"""x [M, K] and w [N, K] of a product x @ w.T."""


class CGemm(Gemm):
    """Products in C. Where an operand is bfloat16, all are read with the values that they have in it.

    Other types and devices are multiplied by the libraries.

    Raises:
        CompilerError: it cannot be built here.
    """

    def __init__(self) -> None:
        library = c_library("product")
        self._product, self._scratch = library.product, library.product_scratch
        self._product.argtypes, self._product.restype = [ctypes.c_char_p], None
        self._scratch.argtypes, self._scratch.restype = [*[ctypes.c_int64] * 3, ctypes.c_int], ctypes.c_int64
        self._vector: int = library.product_vector()
        self._rooms = threading.local()
        self._try_out()

    def is_fast(self, dtype: torch.dtype) -> bool:
        """Whether it beats the libraries on this processor in this type, by what they leave unused there.

        In float32 they are at least as good where their own instructions are all used and nothing has to be copied. In
        bfloat16 a processor may multiply whole tiles (AMX), which this does not.
        """
        if self._vector < FAST_VECTOR or dtype not in KINDS:
            return False
        has_tiles = getattr(torch.cpu, "_is_amx_tile_supported", None)
        return not libraries_use_all() if dtype == torch.float32 else not (has_tiles is not None and has_tiles())

    def multiplies_itself(self, x: Tensor) -> bool:
        """See `Gemm`."""
        return _holds(x) or super().multiplies_itself(x)

    def widens(self, x: Tensor) -> bool:
        """See `Gemm`."""
        return not self.multiplies_itself(x) and super().widens(x)

    def reads_wide(self, x: Tensor) -> bool:
        """See `Gemm`."""
        return x.dtype == torch.bfloat16 and self.multiplies_itself(x)

    def writes_to_room(self, x: Tensor) -> bool:
        """See `Gemm`."""
        return _holds(x) or super().writes_to_room(x)

    def padded_rows(self, rows: int, like: Tensor) -> int:
        """See `Gemm`."""
        return rows if _holds(like) else super().padded_rows(rows, like)

    def operand(self, w: Tensor, dtype: torch.dtype) -> Tensor:
        """See `Gemm`; what is rounded as it is packed stays as it is."""
        return w if w.dtype in KINDS and dtype == torch.bfloat16 else super().operand(w, dtype)

    def product(self, x_MK: Tensor, w_NK: Tensor, room_MN: Tensor | None = None) -> Tensor:
        """See `Gemm`; the result is bfloat16 if an operand is."""
        if not _knows(x_MK, w_NK):
            return super().product(x_MK, w_NK, room_MN)
        if _are_few(x_MK, w_NK, room_MN):
            return torch.mm(x_MK, w_NK.t(), out=room_MN)
        dtype = torch.bfloat16 if torch.bfloat16 in (x_MK.dtype, w_NK.dtype) else torch.float32
        out = x_MK.new_empty(len(x_MK), len(w_NK), dtype=dtype) if room_MN is None else room_MN
        self._multiply(out, [(x_MK, w_NK)])
        return out

    def product_into(self, out_MN: Tensor, x_MK: Tensor, w_NK: Tensor) -> None:
        """See `Gemm`."""
        if _knows(x_MK, w_NK) and _takes(out_MN):
            if _are_few(x_MK, w_NK, out_MN):
                torch.mm(x_MK[: len(out_MN)], w_NK.t(), out=out_MN)
            else:
                self._multiply(out_MN, [(x_MK, w_NK)])
        elif _knows(x_MK, w_NK):
            out_MN.copy_(self.product(x_MK[: len(out_MN)], w_NK))
        else:
            super().product_into(out_MN, x_MK, w_NK)

    def two_products_into(self, out_MN: Tensor, first: Pair, second: Pair) -> None:
        """See `Gemm`."""
        if _knows(*first, *second) and _takes(out_MN):
            self._multiply(out_MN, [first, second])
        elif _knows(*first, *second):
            summed = torch.empty_like(out_MN, memory_format=torch.contiguous_format)
            self._multiply(summed, [first, second])
            out_MN.copy_(summed)
        else:
            super().two_products_into(out_MN, first, second)

    def weight_gradient(self, x_MK: Tensor, grad_MN: Tensor) -> Tensor:
        """See `Gemm`."""
        return self.product(x_MK.t(), grad_MN.t())

    def weight_gradient_into(self, out_KN: Tensor, x_MK: Tensor, grad_MN: Tensor) -> None:
        """See `Gemm`."""
        self.product_into(out_KN, x_MK.t(), grad_MN.t())

    def add_weight_gradient(self, out_KN: Tensor, x_MK: Tensor, grad_MN: Tensor) -> None:
        """See `Gemm`."""
        if _knows(x_MK, grad_MN) and _takes(out_KN):
            self._multiply(out_KN, [(x_MK.t(), grad_MN.t())], adds=True)
        elif _knows(x_MK, grad_MN):
            out_KN += self.wide_product(x_MK.t(), grad_MN.t())
        else:
            super().add_weight_gradient(out_KN, x_MK, grad_MN)

    def wide_product(self, x_MK: Tensor, w_NK: Tensor) -> Tensor:
        """See `Gemm`."""
        if not _knows(x_MK, w_NK):
            return super().wide_product(x_MK, w_NK)
        return self.product(x_MK, w_NK, x_MK.new_empty(len(x_MK), len(w_NK), dtype=torch.float32))

    def _multiply(self, out: Tensor, pairs: Sequence[Pair], *, adds: bool = False) -> None:
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
            terms += TERM.pack(
                x.data_ptr(), *x.stride(), KINDS[x.dtype], w.data_ptr(), *w.stride(), KINDS[w.dtype], x.shape[1]
            )
        threads = torch.get_num_threads()
        room = self._room(self._scratch(rows, columns, depth, threads))
        target = (out.data_ptr(), out.stride(0), KINDS[out.dtype], adds)
        self._product(JOB.pack(*target, rows, columns, is_narrow, threads, room, len(pairs)) + terms)

    def _room(self, words: int) -> int:
        """The address of scratch memory, this thread's own; kept, as to touch new memory costs more than to pack.

        It is no tensor, so that who counts those of a layer does not find it there.
        """
        if getattr(self._rooms, "words", -1) < words:
            array = self._rooms.array = np.empty(words + LINE, np.int32)
            self._rooms.words = words
            self._rooms.address = array.ctypes.data + -array.ctypes.data % (LINE * array.itemsize)
        address: int = self._rooms.address
        return address

    def _try_out(self) -> None:
        """Compare with float64, so that a compiler that errs is found out before a run is.

        Raises:
            CompilerError: it differs.
        """
        rows, columns, depth = PROBE
        x, w = (torch.linspace(low, 9, n * depth).sin().view(n, depth) for low, n in ((-7, rows), (2, columns)))
        for dtype, error in TOLERANCES.items():
            a, b = x.to(dtype), w.to(dtype)
            right = a.double() @ b.double().t()
            for left, other in ((a, b), (a.t().contiguous().t(), b.t().contiguous().t()), (a, b.float())):
                found = torch.full((rows, columns), float("nan"))
                self.product_into(found, left, other)
                self.add_weight_gradient(found, left.t(), other.t())
                if not (found.double() - 2 * right).abs().max() <= error * right.abs().max():
                    raise CompilerError(f"what the compiler built of products is wrong in {dtype}")


def _holds(x: Tensor) -> bool:
    """Whether memory is a CPU's, with numbers that it knows."""
    return x.is_cpu and x.dtype in KINDS


def _knows(*operands: Tensor) -> bool:
    return all(_holds(x) and x.dim() == 2 for x in operands)


def _are_few(x_MK: Tensor, w_NK: Tensor, out: Tensor | None) -> bool:
    """Whether torch.mm is faster for so few rows; it reads and writes one type."""
    if x_MK.shape[0] >= FEW_ROWS[x_MK.dtype]:
        return False
    dtypes = {x_MK.dtype, w_NK.dtype, x_MK.dtype if out is None else out.dtype}
    return len(dtypes) == 1 and not multiplies_wide(x_MK)


def _takes(out: Tensor) -> bool:
    return _holds(out) and (out.stride(1) == 1 or out.shape[1] == 1)
