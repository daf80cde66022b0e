"""Gated linear attention in chunks on a CPU in C, forward and backward, a a `ChunkKernel` (ops/linear_attention.py).

Its reference is `ops.linear_attention.Chunks`. Two pairs of functions: `linear_chunks.c` computes the products within
the chunks, and `linear_scan.c` the states between them and the outputs. Tensors of tokens are float32 or bfloat16,
computation is float32. Results are bitwise independent of the number of threads.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from moefold.ops.cpu.build import (
    POINTER,
    SIZE,
    TensorView,
    check_results,
    declare,
    load_library,
    pointer_fields,
    size_fields,
)
from moefold.ops.expert_ops import unit_stride
from moefold.ops.linear_attention import ChunkedLinearAttention, Chunks

LIBRARIES = ("linear_chunks", "linear_channel_chunks", "linear_scan")
"""Sources of the kernel."""
MAX_HEAD_DIM = 256
"""Maximum width of a key or value."""
MAX_CHUNK_SIZE = 128
"""Maximum tokens of a chunk."""
BLOCK_ROWS = 16
"""Rows of a chunk in memory are a multiple of this, as in `linear_attention.h`."""
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 3e-2}
"""Tolerances of the self-test, by dtype of queries, keys and values. A miscompiled kernel differs by more."""
SELF_TEST_SHAPE = (41, 2, 2, 4, 12, 9)
"""Tokens, samples, key heads, value heads, and widths of keys and values of the self-test."""


_TOKEN_TENSORS = tuple((name, TensorView) for name in ("q", "k", "v", "log_decay", "beta"))
_CHUNK_TENSORS = ("read_keys", "scores", "write_keys", "solved", "decay", "products")


class _InputsStruct(ctypes.Structure):
    """C struct `linear_inputs`."""

    _fields_ = (*_TOKEN_TENSORS, *pointer_fields("starts"))


class _GradsStruct(ctypes.Structure):
    """C struct `linear_grads`."""

    _fields_ = _TOKEN_TENSORS


class _ChunksStruct(ctypes.Structure):
    """C struct `chunk_tensors`."""

    _fields_ = pointer_fields(*_CHUNK_TENSORS)


class _Sizes(ctypes.Structure):
    """C struct `linear_sizes`."""

    _fields_ = size_fields(
        *("tokens", "samples", "key_heads", "repeats", "key_size", "value_size", "decay_size"),
        *("chunk_size", "num_chunks", "has_delta", "threads"),
    )
    tokens: int
    samples: int
    key_heads: int
    repeats: int
    key_size: int
    value_size: int
    decay_size: int
    chunk_size: int
    num_chunks: int
    has_delta: int
    threads: int

    @classmethod
    def of(cls, inputs: Sequence[Tensor], chunk_size: int) -> Self:
        """Return the sizes of q, k, v, log_decay and maybe beta."""
        q, _, v, log_decay, *betas = inputs
        tokens, samples, key_heads, key_size = q.shape
        heads, value_size = v.shape[2:]
        widths = (key_size, value_size, log_decay.shape[-1])
        chunks = (chunk_size, -(-tokens // chunk_size))
        return cls(tokens, samples, key_heads, heads // key_heads, *widths, *chunks, bool(betas))

    @property
    def rows(self) -> int:
        """Rows of a chunk in memory."""
        return self.padded(self.chunk_size, BLOCK_ROWS)

    @staticmethod
    def padded(size: int, multiple: int) -> int:
        """Return the smallest multiple that is at least a size."""
        return -(-size // multiple) * multiple

    def chunk_shapes(self, vector_width: int) -> list[tuple[int, ...]]:
        """Return the shapes of the tensors of the chunks. See `CChunks`."""
        heads = (self.num_chunks, self.samples, self.key_heads * self.repeats)
        keys = self.padded(self.key_size, vector_width)
        solved = self.padded(self.value_size, vector_width) + (keys if self.has_delta else 0)
        decays = 1 if self.decay_size == 1 else keys
        rows = self.rows
        shapes = [*((*heads, rows, width) for width in (keys, rows, keys, solved)), (*heads, decays)]
        return [*shapes, (*heads, rows, rows)] if self.has_delta and self.decay_size > 1 else shapes


class _ChunkFunctions:
    """C functions of the products within chunks, for one decay of each head or of each channel."""

    def __init__(self, library: ctypes.CDLL, name: str) -> None:
        self.forward = declare(library[f"{name}_forward"], _InputsStruct, _ChunksStruct, POINTER, _Sizes)
        gradients = (*[_ChunksStruct] * 2, _GradsStruct, POINTER, _Sizes)
        self.backward = declare(library[f"{name}_backward"], _InputsStruct, *gradients)
        self.scratch_floats = declare(library[f"{name}_scratch_floats"], _Sizes, result=SIZE)


class CLinearAttention:
    """Gated linear attention in chunks, for tensors of float32 or bfloat16 and decays in float32."""

    def __init__(self) -> None:
        scan = load_library("linear_scan")
        self.vector_width: int = scan.linear_vector_width()
        self._of_heads = _ChunkFunctions(load_library("linear_chunks"), "linear_chunks")
        self._of_channels = _ChunkFunctions(load_library("linear_channel_chunks"), "linear_channel_chunks")
        outputs = (POINTER, TensorView, *[POINTER] * 4, _Sizes)
        self._scan_forward = declare(scan.linear_scan_forward, _ChunksStruct, *outputs)
        gradients = (*[POINTER] * 2, _ChunksStruct, *[POINTER] * 2, _Sizes)
        self._scan_backward = declare(scan.linear_scan_backward, TensorView, POINTER, _ChunksStruct, *gradients)
        self._scan_scratch_floats = declare(scan.linear_scan_scratch_floats, _Sizes, result=SIZE)
        self._self_test()

    def supports(self, inputs: Sequence[Tensor]) -> bool:
        """See `ChunkKernel`."""
        q, k, v, *decays = inputs
        return (
            all(x.is_cpu for x in inputs)
            and all(x.dtype in TOLERANCES for x in (q, k, v))
            and all(x.dtype == torch.float32 for x in decays)
            and 0 < q.shape[-1] <= MAX_HEAD_DIM
            and 0 < v.shape[-1] <= MAX_HEAD_DIM
            and v.numel() > 0
        )

    def prepare(self, inputs: Sequence[Tensor], is_start_SB: Tensor | None, chunk_size: int) -> "CChunks":
        """See `ChunkKernel`, for chunks of at most MAX_CHUNK_SIZE tokens."""
        sizes = _Sizes.of(inputs, min(chunk_size, MAX_CHUNK_SIZE))
        return CChunks(self, sizes, *_PrepareChunks.apply(self, sizes, is_start_SB, *inputs))

    def chunks_forward(self, sizes: _Sizes, starts: Tensor | None, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Return read_keys, scores, write_keys, solved, decay (see `CChunks`), and the products that backward reads."""
        chunks = [inputs[0].new_empty(shape, dtype=torch.float32) for shape in sizes.chunk_shapes(self.vector_width)]
        functions = self._chunk_functions(sizes)
        scratch = self._scratch(sizes, functions.scratch_floats)
        functions.forward(_to_inputs_struct(inputs, starts), _to_chunks_struct(chunks), scratch.data_ptr(), sizes)
        return chunks

    def chunks_backward(
        self,
        sizes: _Sizes,
        starts: Tensor | None,
        inputs: Sequence[Tensor],
        chunks: Sequence[Tensor | None],
        grads: Sequence[Tensor],
    ) -> list[Tensor]:
        """Return the gradients of the tensors of the tokens, from the gradients of the tensors of the chunks."""
        input_grads = [x.new_empty(x.shape) for x in inputs]
        functions = self._chunk_functions(sizes)
        scratch = self._scratch(sizes, functions.scratch_floats)
        functions.backward(
            _to_inputs_struct(inputs, starts),
            _to_chunks_struct(chunks),
            _to_chunks_struct(grads),
            _GradsStruct(*_to_token_structs(input_grads)),
            scratch.data_ptr(),
            sizes,
        )
        return input_grads

    def scan_forward(
        self, sizes: _Sizes, chunks: Sequence[Tensor], state: Tensor, *, saves: bool
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """Return the outputs, the last states, and for the backward pass states before chunks and written values."""
        out = state.new_empty(sizes.tokens, sizes.samples, sizes.key_heads * sizes.repeats, sizes.value_size)
        last = torch.empty_like(state)
        states = written = None
        if saves:
            keys, values = (sizes.padded(x, self.vector_width) for x in (sizes.key_size, sizes.value_size))
            heads = chunks[0].shape[:3]
            states = state.new_empty(*heads, keys, values)
            written = state.new_empty(*heads, sizes.rows, values)
        scratch = self._scratch(sizes, self._scan_scratch_floats)
        pointers = (None if x is None else x.data_ptr() for x in (last, states, written, scratch))
        self._scan_forward(_to_chunks_struct(chunks), state.data_ptr(), TensorView.of(out), *pointers, sizes)
        return out, last, states, written

    def scan_backward(
        self,
        sizes: _Sizes,
        grads: tuple[Tensor, Tensor],
        chunks: Sequence[Tensor],
        states: Tensor,
        written: Tensor,
    ) -> list[Tensor]:
        """Return the gradients of the chunks' tensors and first states, from the gradients of the scan's results."""
        grad_out, grad_last = grads
        chunk_grads = [torch.empty_like(x) for x in chunks]
        grad_state = torch.empty_like(grad_last)
        scratch = self._scratch(sizes, self._scan_scratch_floats)
        self._scan_backward(
            TensorView.of(grad_out),
            grad_last.data_ptr(),
            _to_chunks_struct(chunks),
            states.data_ptr(),
            written.data_ptr(),
            _to_chunks_struct(chunk_grads),
            grad_state.data_ptr(),
            scratch.data_ptr(),
            sizes,
        )
        return [*chunk_grads, grad_state]

    def _chunk_functions(self, sizes: _Sizes) -> _ChunkFunctions:
        return self._of_heads if sizes.decay_size == 1 else self._of_channels

    @staticmethod
    def _scratch(sizes: _Sizes, scratch_floats: Any) -> Tensor:
        """Allocate scratch memory for the threads of a call."""
        sizes.threads = torch.get_num_threads()
        return torch.empty(sizes.threads * scratch_floats(sizes))

    def _self_test(self) -> None:
        """Compare with the reference."""
        tokens, samples, groups, heads, keys, values = SELF_TEST_SHAPE
        shapes = ((groups, keys), (groups, keys), (heads, values), (heads, 1), (heads,))
        sizes = [tokens * samples * torch.Size(shape).numel() for shape in shapes]
        q, k, v, decay, beta = (
            torch.linspace(start, 2, size).sin().view(tokens, samples, *shape)
            for start, size, shape in zip((-500, 300, -200, 100, -50), sizes, shapes, strict=True)
        )
        is_start_SB = torch.arange(tokens).unsqueeze(1) == torch.tensor([0, 30])
        for dtype, error in TOLERANCES.items():
            narrow = [x.to(dtype) for x in (q / 4, k / 4, v)]
            log_decay = -decay.square()
            channels = log_decay * torch.linspace(0.1, 2, keys)
            for decays in ([log_decay, beta.sigmoid()], [channels, beta.sigmoid()], [channels]):
                inputs = [*narrow, *decays]
                actual = _forward_backward(inputs, is_start_SB, self)
                expected = _forward_backward([x.double() for x in inputs], is_start_SB, None)
                check_results("kernel of linear attention", dtype, actual, expected, error)


@dataclass(frozen=True)
class CChunks:
    """Products within the chunks as in `Chunks`, with rows and columns padded by zeros, as a `PreparedChunks`."""

    kernel: CLinearAttention
    sizes: _Sizes
    read_keys: Tensor
    scores: Tensor
    write_keys: Tensor
    solved: Tensor
    """Columns of `Chunks.values`, followed by columns of `Chunks.erase_keys` with the delta rule."""
    decay: Tensor
    """[N, B, A, 1 or D]."""

    def summary(self) -> tuple[Tensor, Tensor]:
        """See `PreparedChunks`."""
        keys = self.sizes.key_size
        values = self.sizes.value_size
        start = self.sizes.padded(values, self.kernel.vector_width)
        return Chunks(
            self.read_keys[..., :keys],
            self.scores,
            self.write_keys[..., :keys],
            self.solved[..., :values],
            self.solved[..., start : start + keys] if self.sizes.has_delta else None,
            self.decay[..., :keys].unsqueeze(-1),
            self.sizes.tokens,
        ).summary()

    def attend(self, state: Tensor | None) -> tuple[Tensor, Tensor]:
        """See `PreparedChunks`."""
        if state is None:
            state = self.solved.new_zeros(*self.solved.shape[1:3], self.sizes.key_size, self.sizes.value_size)
        tensors = (self.read_keys, self.scores, self.write_keys, self.solved, self.decay)
        return _ScanChunks.apply(self.kernel, self.sizes, *tensors, state)


class _PrepareChunks(torch.autograd.Function):
    """Function of q, k, v, log_decay and maybe beta that returns read_keys, scores, write_keys, solved and decay."""

    @staticmethod
    def forward(
        ctx: Any, kernel: CLinearAttention, sizes: _Sizes, is_start_SB: Tensor | None, *inputs: Tensor
    ) -> tuple[Tensor, ...]:
        starts = None if is_start_SB is None else is_start_SB.contiguous()
        inputs = tuple(unit_stride(x) for x in inputs)
        chunks = kernel.chunks_forward(sizes, starts, inputs)
        _, scores, _, solved, *_ = chunks
        products = chunks.pop() if len(chunks) == len(_CHUNK_TENSORS) else None
        ctx.kernel = kernel
        ctx.sizes = sizes
        ctx.save_for_backward(starts, scores, solved if sizes.has_delta else None, products, *inputs)
        return tuple(chunks)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        starts, scores, solved, products, *inputs = ctx.saved_tensors
        chunks = (None, scores, None, solved, None, products)
        grads = tuple(grad.contiguous() for grad in grads)
        return (None, None, None, *ctx.kernel.chunks_backward(ctx.sizes, starts, inputs, chunks, grads))


class _ScanChunks(torch.autograd.Function):
    """Function of the tensors of `CChunks` and the first states that returns the outputs and the last states."""

    @staticmethod
    def forward(ctx: Any, kernel: CLinearAttention, sizes: _Sizes, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        *chunks, state = tensors
        saves = any(ctx.needs_input_grad)
        out, last, states, written = kernel.scan_forward(sizes, chunks, state.contiguous(), saves=saves)
        ctx.kernel = kernel
        ctx.sizes = sizes
        if saves:
            ctx.save_for_backward(*chunks, states, written)
        return out, last

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor, grad_last: Tensor) -> tuple[Tensor | None, ...]:
        *chunks, states, written = ctx.saved_tensors
        grads = (unit_stride(grad_out), grad_last.contiguous())
        return (None, None, *ctx.kernel.scan_backward(ctx.sizes, grads, chunks, states, written))


def _forward_backward(
    inputs: Sequence[Tensor], is_start_SB: Tensor, kernel: CLinearAttention | None
) -> tuple[Tensor, ...]:
    """Return outputs and gradients of two chunks, whose states come from their summary."""
    leaves = [x.clone().requires_grad_() for x in inputs]
    q, k, v, log_decay, *betas = leaves

    def initial_state(transition: Tensor, update: Tensor) -> Tensor:
        return transition @ update

    attention = ChunkedLinearAttention(32, initial_state, kernel)
    out, last = attention(q, k, v, log_decay, betas[0] if betas else None, is_start_SB=is_start_SB)
    weights = (torch.linspace(low, 3, x.numel()).sin().view(x.shape).to(x.dtype) for low, x in ((-40, out), (7, last)))
    return out, last, *torch.autograd.grad((out, last), leaves, tuple(weights))


def _to_token_structs(inputs: Sequence[Tensor]) -> list[TensorView]:
    """Return the structs of q, k, v, log_decay and beta."""
    structs = [TensorView.of(x) for x in inputs]
    return structs if len(structs) > 4 else [*structs, TensorView()]


def _to_inputs_struct(inputs: Sequence[Tensor], starts: Tensor | None) -> _InputsStruct:
    return _InputsStruct(*_to_token_structs(inputs), None if starts is None else starts.data_ptr())


def _to_chunks_struct(chunks: Sequence[Tensor | None]) -> _ChunksStruct:
    return _ChunksStruct(*(None if x is None else x.data_ptr() for x in chunks))
