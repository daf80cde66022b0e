"""Causal attention on a CPU in C, forward and backward; a `BlockKernel` (ops/block_attention.py).

Its reference is `block_attention.MathBlockAttention`. Tensors are float32 or bfloat16, computation is float32: a result
is rounded once, also where gradients of keys and values are summed over the query heads that share them, in the order
of the heads. Results are bitwise independent of the number of threads.
"""

import ctypes

import torch
from torch import Tensor

from moefold.ops.block_attention import BlockKernel, Mask, MathBlockAttention
from moefold.ops.cpu.build import CompilerError, load_library
from moefold.ops.interface import unit_stride

MAX_HEAD_DIM = 256
"""Maximum head dim, as in `attention.c`."""
MAX_SEQ_LEN = 4096
"""Maximum tokens of a sample, as measured: each thread packs keys and values of a head, which must fit its cache."""
MIN_FAST_VECTOR_WIDTH = 8
"""Floats of a vector from which it is faster than torch's kernel: those of AVX. With SSE2 it takes twice as long."""
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 3e-2}
"""Tolerances of the self-test, by supported dtype; a miscompiled kernel differs by more."""
SELF_TEST_SHAPE = (37, 2, 4, 2, 24)
"""Tokens, samples, query heads, key/value heads and head dim of the self-test: no multiples of vector widths."""


class _HeadsStruct(ctypes.Structure):
    """C struct `heads_view`: address of [S, B, heads, D], strides of the first three dims in elements, and dtype."""

    _fields_ = (
        ("start", ctypes.c_void_p),
        ("token", ctypes.c_int64),
        ("sample", ctypes.c_int64),
        ("head", ctypes.c_int64),
        ("is_bfloat16", ctypes.c_int64),
    )


class CAttention:
    """Causal attention in float32, for tensors of float32 or bfloat16.

    Raises:
        CompilerError: the library cannot be built.
    """

    def __init__(self) -> None:
        library = load_library("attention")
        sizes = [ctypes.c_int64] * 5
        threads = ctypes.c_int
        self._scratch_floats = library.attention_scratch_floats
        self._scratch_floats.argtypes = [ctypes.c_int64] * 2
        self._scratch_floats.restype = ctypes.c_int64
        self._forward = library.attention_forward
        self._backward = library.attention_backward
        buffers = [ctypes.c_void_p] * 2
        self._forward.argtypes = [*[_HeadsStruct] * 4, *buffers, *sizes, threads]
        self._forward.restype = None
        self._backward.argtypes = [*[_HeadsStruct] * 5, buffers[0], *[_HeadsStruct] * 3, buffers[1], *sizes, threads]
        self._backward.restype = None
        self.is_fast: bool = library.attention_vector_width() >= MIN_FAST_VECTOR_WIDTH
        self._self_test()

    def supports(self, q: Tensor, k: Tensor, v: Tensor) -> bool:
        """Return whether the kernel supports these tensors; depends on shapes and dtypes only."""
        return (
            all(x.is_cpu and x.dtype == q.dtype in TOLERANCES for x in (q, k, v))
            and k.shape == v.shape
            and 0 < q.shape[-1] == k.shape[-1] <= MAX_HEAD_DIM
            and q.shape[0] == k.shape[0] <= MAX_SEQ_LEN
            and q.shape[1] == k.shape[1]
            and k.shape[2] > 0
            and q.shape[2] % k.shape[2] == 0
            and q.numel() > 0
        )

    def forward(self, q: Tensor, k: Tensor, v: Tensor, block_mask: Mask) -> tuple[Tensor, Tensor]:
        """Return (out, lse); see `BlockKernel`. Causal only."""
        assert isinstance(block_mask, str), "the kernel supports causal attention only"
        assert block_mask == "causal", block_mask
        tokens, samples, heads, _ = q.shape
        out = q.new_empty(q.shape)
        lse = q.new_empty((samples, heads, tokens), dtype=torch.float32)
        inputs = [unit_stride(x) for x in (q, k, v)]
        scratch, *sizes = self._scratch_and_sizes(q, k)
        self._forward(*map(_to_heads_struct, (*inputs, out)), lse.data_ptr(), scratch.data_ptr(), *sizes)
        return out, lse.permute(2, 0, 1)

    def backward(
        self, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, block_mask: Mask
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return (dq, dk, dv)."""
        assert isinstance(block_mask, str), "the kernel supports causal attention only"
        assert block_mask == "causal", block_mask
        is_shared = k.shape[2] != q.shape[2]
        dq = q.new_empty(q.shape)
        # Gradients of shared heads are rounded after their sum.
        dk, dv = (q.new_empty(q.shape, dtype=torch.float32 if is_shared else q.dtype) for _ in range(2))
        inputs = [unit_stride(x) for x in (grad_out, q, k, v, out)]
        lse_BAS = lse.permute(1, 2, 0).contiguous()
        scratch, *sizes = self._scratch_and_sizes(q, k)
        args = *map(_to_heads_struct, inputs), lse_BAS.data_ptr(), *map(_to_heads_struct, (dq, dk, dv))
        self._backward(*args, scratch.data_ptr(), *sizes)
        if is_shared:
            dk, dv = (x.unflatten(2, (k.shape[2], -1)).sum(3).to(k.dtype) for x in (dk, dv))
        return dq, dk, dv

    def _scratch_and_sizes(self, q: Tensor, k: Tensor) -> tuple[Tensor, int, int, int, int, int, int]:
        tokens, samples, heads, d = q.shape
        threads = torch.get_num_threads()
        scratch = q.new_empty((threads * self._scratch_floats(tokens, d),), dtype=torch.float32)
        return scratch, tokens, samples, heads, heads // k.shape[2], d, threads

    def _self_test(self) -> None:
        """Compare with the reference, to catch miscompiled kernels at start-up.

        Raises:
            CompilerError: results differ.
        """
        tokens, samples, heads, groups, d = SELF_TEST_SHAPE
        q, grad, k, v = (
            torch.linspace(low, 1, tokens * samples * count * d).sin().view(tokens, samples, count, d)
            for low, count in ((-2, heads), (5, heads), (-3, groups), (4, groups))
        )
        for dtype, error in TOLERANCES.items():
            inputs = [x.to(dtype) for x in (q, k, v, grad)]
            actual = _forward_backward(self, *inputs)
            expected = _forward_backward(MathBlockAttention(), *(x.double() for x in inputs))
            for a, e in zip(actual, expected, strict=True):
                if not torch.allclose(a.double(), e, rtol=error, atol=error):
                    raise CompilerError("the compiled attention kernel is wrong")


def _forward_backward(kernel: BlockKernel, q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
    out, lse = kernel.forward(q, k, v, "causal")
    return out, lse, *kernel.backward(grad, q, k, v, out, lse, "causal")


def _to_heads_struct(x: Tensor) -> _HeadsStruct:
    return _HeadsStruct(x.data_ptr(), *x.stride()[:3], x.dtype == torch.bfloat16)
