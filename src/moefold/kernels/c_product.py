"""Matrix products on a CPU, in C, of any row count, strides and mix of float32 and bfloat16; a `model.gemm.Gemm`.

What makes it worth having is not its rate, which is that of the libraries: every product goes where its result belongs,
rows need no padding, transposed operands no copy, and weights no copy in another type, as all that happens where
operands are packed anyway. No bit of a result depends on the number of threads or, if rows are not few, on other rows.
"""

import ctypes
import threading
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moefold.kernels.c_library import CompilerError, c_library
from moefold.model.gemm import Gemm, libraries_use_all, multiplies_wide

KINDS = {torch.float32: 0, torch.bfloat16: 1}
"""What numbers are in memory, as in `product.c`."""
FAST_VECTOR = 8
"""Numbers of a vector from which it is as fast as the libraries: those of AVX."""
FEW_ROWS = 64
"""Rows below which an operand is read once and packing costs more than the product: tokens that are decoded."""
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
"""Of the trial, relative to the largest value: what is wrong is wrong by more."""
LINE = 16
"""Words of a line of the cache, at which panels begin."""
PROBE = (37, 41, 75)
"""Rows, columns and depth of the trial: what vectors and panels do not divide."""


class _Numbers(ctypes.Structure):
    """`numbers` of the source."""

    _fields_ = (
        ("start", ctypes.c_void_p),
        ("line", ctypes.c_int64),
        ("step", ctypes.c_int64),
        ("kind", ctypes.c_int64),
    )


class _Term(ctypes.Structure):
    """`term` of the source."""

    _fields_ = (("a", _Numbers), ("b", _Numbers), ("depth", ctypes.c_int64))


class _Results(ctypes.Structure):
    """`results` of the source."""

    _fields_ = (
        ("start", ctypes.c_void_p),
        ("row", ctypes.c_int64),
        ("kind", ctypes.c_int64),
        ("adds", ctypes.c_int64),
    )


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
        sizes, threads = [ctypes.c_int64] * 2, ctypes.c_int
        self._product.argtypes = [
            ctypes.POINTER(_Term), ctypes.c_int, _Results, *sizes, ctypes.c_int, ctypes.c_void_p, threads
        ]  # fmt: skip
        self._product.restype = None
        self._scratch.argtypes, self._scratch.restype = [*sizes, ctypes.c_int64, threads], ctypes.c_int64
        self._multiplies_pairs = bool(library.product_multiplies_pairs())
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
        return x.device.type == "cpu" and x.dtype in KINDS or super().multiplies_itself(x)

    def widens(self, x: Tensor) -> bool:
        """See `Gemm`."""
        return not self.multiplies_itself(x) and super().widens(x)

    def reads_wide(self, x: Tensor) -> bool:
        """See `Gemm`."""
        return x.dtype == torch.bfloat16 and self.multiplies_itself(x)

    def writes_to_room(self, x: Tensor) -> bool:
        """See `Gemm`."""
        return (x.device.type == "cpu" and x.dtype in KINDS) or super().writes_to_room(x)

    def padded_rows(self, rows: int, like: Tensor) -> int:
        """See `Gemm`."""
        return rows if like.device.type == "cpu" and like.dtype in KINDS else super().padded_rows(rows, like)

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
            assert len(x) >= rows, (out.shape, x.shape)
            assert w.shape == (columns, x.shape[1]), (out.shape, x.shape, w.shape)
        if out.numel() == 0:
            return
        terms = (_Term * len(pairs))(*(_Term(_numbers(x), _numbers(w), x.shape[1]) for x, w in pairs))
        is_narrow = any(t.dtype == torch.bfloat16 for pair in pairs for t in pair)
        threads = torch.get_num_threads()
        words = self._scratch(rows, columns, sum(x.shape[1] for x, _ in pairs), threads)
        results = _Results(out.data_ptr(), out.stride(0), KINDS[out.dtype], adds)
        self._product(terms, len(pairs), results, rows, columns, is_narrow, self._room(words), threads)

    def _room(self, words: int) -> int:
        """Scratch memory, this thread's own; kept, as the first touch of new memory costs more than to pack.

        It is no tensor, so that who counts those of a layer does not find it there.
        """
        room: NDArray[np.int32] | None = getattr(self._rooms, "room", None)
        if room is None or len(room) < words + LINE:
            room = self._rooms.room = np.empty(words + LINE, np.int32)
        return room.ctypes.data + -room.ctypes.data % (LINE * room.itemsize)

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


def _numbers(x: Tensor) -> _Numbers:
    return _Numbers(x.data_ptr(), *x.stride(), KINDS[x.dtype])


def _knows(*operands: Tensor) -> bool:
    return all(x.device.type == "cpu" and x.dtype in KINDS and x.dim() == 2 for x in operands)


def _are_few(x_MK: Tensor, w_NK: Tensor, out: Tensor | None) -> bool:
    """Whether torch.mm is faster for so few rows; it reads and writes one type."""
    dtypes = {x_MK.dtype, w_NK.dtype, x_MK.dtype if out is None else out.dtype}
    return len(x_MK) < FEW_ROWS and len(dtypes) == 1 and not multiplies_wide(x_MK)


def _takes(out: Tensor) -> bool:
    return out.device.type == "cpu" and out.dtype in KINDS and (out.stride(1) == 1 or out.shape[1] == 1)
