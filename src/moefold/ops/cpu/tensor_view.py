"""C struct of a strided tensor of heads, which kernels of softmax and of linear attention take."""

import ctypes
from typing import Self

import torch
from torch import Tensor


class TensorView(ctypes.Structure):
    """C structs `heads_view` and `tokens_view`: address of [S, B, heads, D], strides of the first dims, and dtype.

    Strides are in elements; the last dim has stride 1.
    """

    _fields_ = (
        ("start", ctypes.c_void_p),
        ("token", ctypes.c_int64),
        ("sample", ctypes.c_int64),
        ("head", ctypes.c_int64),
        ("is_bfloat16", ctypes.c_int64),
    )

    @classmethod
    def of(cls, x: Tensor) -> Self:
        """Return the view of a tensor of float32 or bfloat16, which must outlive it."""
        return cls(x.data_ptr(), *x.stride()[:3], x.dtype == torch.bfloat16)
