"""States and outputs of gated linear attention over its chunks in Triton, a a `ChunkKernel` (ops/linear_attention.py).

Its reference is `ops.linear_attention.Chunks`, whose torch operations compute the products within the chunks here too.
The reference then computes one chunk after another, with a few launches each. Here one launch in each direction
computes all chunks: a program keeps some columns of the state of a head in registers. No program adds to the output of
another program, so results are deterministic. Gradients of the products within chunks are matrix products over all
chunks at once.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from moefold.ops.linear_attention import Chunks, prepare_chunks

MAX_KEY_SIZE = 128
"""Maximum width of a key, which a program has in two pieces."""
MAX_CHUNK_SIZE = 128
"""Maximum tokens of a chunk, which a program has in one piece."""
MIN_BLOCK = 16
"""Minimum rows and columns of a matrix product in Triton."""


@triton.jit
def _load_keys(keys, row, first, size, key_size, BLOCK_D: tl.constexpr):
    """Load the columns from `first` on of the keys of a chunk."""
    column = first + tl.arange(0, BLOCK_D)[None, :]
    return tl.load(keys + row * key_size + column, mask=(row < size) & (column < key_size), other=0.0)


@triton.jit
def _load_scores(scores, row, size, BLOCK_C: tl.constexpr):
    """Load the scores of a chunk."""
    column = tl.arange(0, BLOCK_C)[None, :]
    return tl.load(scores + row * size + column, mask=(row < size) & (column < size), other=0.0)


@triton.jit
def _load_decay(decay, first, key_size, decay_size, BLOCK_D: tl.constexpr):
    """Load the decays of the key channels from `first` on, or the decay of the head."""
    key = first + tl.arange(0, BLOCK_D)[:, None]
    return tl.load(decay + tl.minimum(key, decay_size - 1), mask=key < key_size, other=0.0)


@triton.jit
def _load_state(state, first, column, key_size, value_size, BLOCK_D: tl.constexpr):
    """Load the rows from `first` on of some columns of a state."""
    key = first + tl.arange(0, BLOCK_D)[:, None]
    is_state = (key < key_size) & (column < value_size)
    return tl.load(state + key * value_size + column, mask=is_state, other=0.0)


@triton.jit
def _store_state(state, value, first, column, key_size, value_size, BLOCK_D: tl.constexpr):
    """Store the rows that `_load_state` loads."""
    key = first + tl.arange(0, BLOCK_D)[:, None]
    tl.store(state + key * value_size + column, value, mask=(key < key_size) & (column < value_size))


@triton.jit
def _scan_kernel(
    read_keys, scores, write_keys, values, erase_keys, decay, state, out, written, states, last,
    num_chunks, num_heads, size, key_size, value_size, decay_size,
    HAS_DELTA: tl.constexpr, HAS_OUT: tl.constexpr, SAVES: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, HAS_TWO: tl.constexpr,
):  # fmt: skip
    """Compute states, written values and outputs of one head of one sample, for BLOCK_V columns of the values.

    HAS_TWO: the rows of the state are in two halves of BLOCK_D.
    """
    head = tl.program_id(0).to(tl.int64)
    row = tl.arange(0, BLOCK_C)[:, None]
    column = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)[None, :]
    is_value = (row < size) & (column < value_size)
    state_size = key_size * value_size
    s0 = _load_state(state + head * state_size, 0, column, key_size, value_size, BLOCK_D)
    s1 = s0
    if HAS_TWO:
        s1 = _load_state(state + head * state_size, BLOCK_D, column, key_size, value_size, BLOCK_D)
    for i in range(num_chunks):
        place = i * num_heads + head
        keys_at = place * size * key_size
        values_at = place * size * value_size + row * value_size + column
        if SAVES:
            _store_state(states + place * state_size, s0, 0, column, key_size, value_size, BLOCK_D)
            if HAS_TWO:
                _store_state(states + place * state_size, s1, BLOCK_D, column, key_size, value_size, BLOCK_D)
        new = tl.load(values + values_at, mask=is_value, other=0.0)
        if HAS_DELTA:
            keys = _load_keys(erase_keys + keys_at, row, 0, size, key_size, BLOCK_D)
            new = tl.dot(keys, s0, new, input_precision=PRECISION)
            if HAS_TWO:
                keys = _load_keys(erase_keys + keys_at, row, BLOCK_D, size, key_size, BLOCK_D)
                new = tl.dot(keys, s1, new, input_precision=PRECISION)
        if SAVES:
            tl.store(written + values_at, new, mask=is_value)
        if HAS_OUT:
            score = _load_scores(scores + place * size * size, row, size, BLOCK_C)
            result = tl.dot(score, new, input_precision=PRECISION)
            keys = _load_keys(read_keys + keys_at, row, 0, size, key_size, BLOCK_D)
            result = tl.dot(keys, s0, result, input_precision=PRECISION)
            if HAS_TWO:
                keys = _load_keys(read_keys + keys_at, row, BLOCK_D, size, key_size, BLOCK_D)
                result = tl.dot(keys, s1, result, input_precision=PRECISION)
            tl.store(out + values_at, result, mask=is_value)
        keys = _load_keys(write_keys + keys_at, row, 0, size, key_size, BLOCK_D)
        s0 *= _load_decay(decay + place * decay_size, 0, key_size, decay_size, BLOCK_D)
        s0 = tl.dot(tl.trans(keys), new, s0, input_precision=PRECISION)
        if HAS_TWO:
            keys = _load_keys(write_keys + keys_at, row, BLOCK_D, size, key_size, BLOCK_D)
            s1 *= _load_decay(decay + place * decay_size, BLOCK_D, key_size, decay_size, BLOCK_D)
            s1 = tl.dot(tl.trans(keys), new, s1, input_precision=PRECISION)
    _store_state(last + head * state_size, s0, 0, column, key_size, value_size, BLOCK_D)
    if HAS_TWO:
        _store_state(last + head * state_size, s1, BLOCK_D, column, key_size, value_size, BLOCK_D)


@triton.jit
def _scan_backward_kernel(
    grad_out, grad_last, read_keys, scores, write_keys, erase_keys, decay, grad_after, grad_values, grad_state,
    num_chunks, num_heads, size, key_size, value_size, decay_size,
    HAS_DELTA: tl.constexpr, HAS_OUT: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, HAS_TWO: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of states and written values, from the last chunk to the first, as `_scan_kernel`."""
    head = tl.program_id(0).to(tl.int64)
    row = tl.arange(0, BLOCK_C)[:, None]
    column = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)[None, :]
    is_value = (row < size) & (column < value_size)
    state_size = key_size * value_size
    g0 = _load_state(grad_last + head * state_size, 0, column, key_size, value_size, BLOCK_D)
    g1 = g0
    if HAS_TWO:
        g1 = _load_state(grad_last + head * state_size, BLOCK_D, column, key_size, value_size, BLOCK_D)
    for step in range(num_chunks):
        place = (num_chunks - 1 - step) * num_heads + head
        keys_at = place * size * key_size
        values_at = place * size * value_size + row * value_size + column
        _store_state(grad_after + place * state_size, g0, 0, column, key_size, value_size, BLOCK_D)
        keys = _load_keys(write_keys + keys_at, row, 0, size, key_size, BLOCK_D)
        new = tl.dot(keys, g0, input_precision=PRECISION)
        g0 *= _load_decay(decay + place * decay_size, 0, key_size, decay_size, BLOCK_D)
        if HAS_TWO:
            _store_state(grad_after + place * state_size, g1, BLOCK_D, column, key_size, value_size, BLOCK_D)
            keys = _load_keys(write_keys + keys_at, row, BLOCK_D, size, key_size, BLOCK_D)
            new = tl.dot(keys, g1, new, input_precision=PRECISION)
            g1 *= _load_decay(decay + place * decay_size, BLOCK_D, key_size, decay_size, BLOCK_D)
        if HAS_OUT:
            grad = tl.load(grad_out + values_at, mask=is_value, other=0.0)
            score = _load_scores(scores + place * size * size, row, size, BLOCK_C)
            new = tl.dot(tl.trans(score), grad, new, input_precision=PRECISION)
            keys = _load_keys(read_keys + keys_at, row, 0, size, key_size, BLOCK_D)
            g0 = tl.dot(tl.trans(keys), grad, g0, input_precision=PRECISION)
            if HAS_TWO:
                keys = _load_keys(read_keys + keys_at, row, BLOCK_D, size, key_size, BLOCK_D)
                g1 = tl.dot(tl.trans(keys), grad, g1, input_precision=PRECISION)
        tl.store(grad_values + values_at, new, mask=is_value)
        if HAS_DELTA:
            keys = _load_keys(erase_keys + keys_at, row, 0, size, key_size, BLOCK_D)
            g0 = tl.dot(tl.trans(keys), new, g0, input_precision=PRECISION)
            if HAS_TWO:
                keys = _load_keys(erase_keys + keys_at, row, BLOCK_D, size, key_size, BLOCK_D)
                g1 = tl.dot(tl.trans(keys), new, g1, input_precision=PRECISION)
    _store_state(grad_state + head * state_size, g0, 0, column, key_size, value_size, BLOCK_D)
    if HAS_TWO:
        _store_state(grad_state + head * state_size, g1, BLOCK_D, column, key_size, value_size, BLOCK_D)


class TritonLinearAttention:
    """Gated linear attention in chunks whose states and outputs are computed by two kernels, in float32."""

    def supports(self, inputs: Sequence[Tensor]) -> bool:
        """See `ChunkKernel`."""
        _, k, v, *_ = inputs
        return v.dtype != torch.float64 and k.shape[-1] <= MAX_KEY_SIZE and v.numel() > 0

    def prepare(self, inputs: Sequence[Tensor], is_start_SB: Tensor | None, chunk_size: int) -> "TritonChunks":
        """See `ChunkKernel`, for chunks of at most MAX_CHUNK_SIZE tokens."""
        return TritonChunks(prepare_chunks(inputs, is_start_SB, min(chunk_size, MAX_CHUNK_SIZE)))


@dataclass(frozen=True)
class TritonChunks:
    """Products within the chunks, the input of the kernels, as a `PreparedChunks`."""

    chunks: Chunks

    def summary(self) -> tuple[Tensor, Tensor]:
        """See `PreparedChunks`."""
        chunks = self.chunks
        key_size = chunks.write_keys.shape[-1]
        values, state = chunks.padded_for_summary()
        tensors = (chunks.write_keys, values, chunks.erase_keys, chunks.decay, state)
        last: Tensor = _Scan.apply(None, None, *tensors)[1]
        update, transition = last.split((last.shape[-1] - key_size, key_size), -1)
        return transition, update

    def attend(self, state: Tensor | None) -> tuple[Tensor, Tensor]:
        """See `PreparedChunks`."""
        chunks = self.chunks
        if state is None:
            state = chunks.first_state()
        tensors = (chunks.write_keys, chunks.values, chunks.erase_keys, chunks.decay, state)
        out, last = _Scan.apply(chunks.read_keys, chunks.scores, *tensors)
        return chunks.tokens_of(out), last


class _Scan(torch.autograd.Function):
    """Function of read_keys and scores or None, write_keys, values, erase_keys or None, decay and the first states.

    It returns the outputs [N, B, A, C, Dv], empty without read_keys, and the last states [B, A, D, Dv].
    """

    @staticmethod
    def forward(
        ctx: Any,
        read_keys: Tensor | None,
        scores: Tensor | None,
        write_keys: Tensor,
        values: Tensor,
        erase_keys: Tensor | None,
        decay: Tensor,
        state: Tensor,
    ) -> tuple[Tensor, Tensor]:
        read_keys, scores, erase_keys = (None if x is None else x.contiguous() for x in (read_keys, scores, erase_keys))
        write_keys, values, decay, state = (x.contiguous() for x in (write_keys, values, decay, state))
        saves = any(ctx.needs_input_grad)
        keys = (read_keys, scores, write_keys, values, erase_keys, decay)
        out, last, states, written = scan_forward(*keys, state, saves=saves)
        if saves:
            ctx.save_for_backward(read_keys, scores, write_keys, erase_keys, decay, states, written)
        return out, last

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor, grad_last: Tensor) -> tuple[Tensor | None, ...]:
        read_keys, scores, write_keys, erase_keys, decay, states, written = ctx.saved_tensors
        grad_out = grad_out.contiguous()
        keys = (read_keys, scores, write_keys, erase_keys, decay)
        after, grad_values, grad_state = scan_backward(grad_out, grad_last.contiguous(), *keys)
        return (
            None if read_keys is None else grad_out @ states.mT,
            None if scores is None else grad_out @ written.mT,
            written @ after.mT,
            grad_values,
            None if erase_keys is None else grad_values @ states.mT,
            (after * states).sum_to_size(decay.shape),
            grad_state,
        )


def scan_forward(
    read_keys: Tensor | None,
    scores: Tensor | None,
    write_keys: Tensor,
    values: Tensor,
    erase_keys: Tensor | None,
    decay: Tensor,
    state: Tensor,
    *,
    saves: bool,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Return outputs, last states, and if `saves` the states before the chunks and the written values.

    The tensors are contiguous, with the shapes of `Chunks`. Without read_keys and scores the outputs are empty.
    """
    shape = values.shape
    out = values.new_empty(shape if read_keys is not None else (0,))
    last = torch.empty_like(state)
    states = values.new_empty(len(values), *state.shape) if saves else None
    written = torch.empty_like(values) if saves else None
    grid, sizes, options = _launch(write_keys, values, decay)
    _scan_kernel[grid](
        values if read_keys is None else read_keys, values if scores is None else scores, write_keys, values,
        values if erase_keys is None else erase_keys, decay, state, out, values if written is None else written,
        values if states is None else states, last, *sizes, HAS_DELTA=erase_keys is not None,
        HAS_OUT=read_keys is not None, SAVES=saves, **options,
    )  # fmt: skip
    return out, last, states, written


def scan_backward(
    grad_out: Tensor,
    grad_last: Tensor,
    read_keys: Tensor | None,
    scores: Tensor | None,
    write_keys: Tensor,
    erase_keys: Tensor | None,
    decay: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of the states after the chunks, of the written values, and of the first states."""
    heads = write_keys.shape[:3]
    grad_values = grad_last.new_empty(*write_keys.shape[:-1], grad_last.shape[-1])
    after = grad_last.new_empty(heads[0], *grad_last.shape)
    grad_state = torch.empty_like(grad_last)
    grid, sizes, options = _launch(write_keys, grad_values, decay)
    _scan_backward_kernel[grid](
        grad_out, grad_last, grad_values if read_keys is None else read_keys, grad_values if scores is None else scores,
        write_keys, grad_values if erase_keys is None else erase_keys, decay, after, grad_values, grad_state, *sizes,
        HAS_DELTA=erase_keys is not None, HAS_OUT=read_keys is not None,
        **options,
    )  # fmt: skip
    return after, grad_values, grad_state


def _launch(
    write_keys: Tensor, values: Tensor, decay: Tensor
) -> tuple[tuple[int, int], tuple[int, ...], dict[str, int | str]]:
    """Return the grid, the sizes and the options of a launch."""
    num_chunks, samples, heads, size, key_size = write_keys.shape
    value_size = values.shape[-1]
    block_v = 2 * MIN_BLOCK
    options: dict[str, int | str] = {
        "PRECISION": _dot_precision(),
        "BLOCK_C": max(MIN_BLOCK, triton.next_power_of_2(size)),
        "BLOCK_D": max(MIN_BLOCK, min(triton.next_power_of_2(key_size), MAX_KEY_SIZE // 2)),
        "BLOCK_V": block_v,
        "HAS_TWO": key_size > MAX_KEY_SIZE // 2,
        "num_warps": 4,
        "num_stages": 1,
    }
    grid = (samples * heads, triton.cdiv(value_size, block_v))
    return grid, (num_chunks, samples * heads, size, key_size, value_size, decay.shape[-2]), options


def _dot_precision() -> str:
    """Return tl.dot's precision for float32: three products in TF32, or one if torch may use TF32."""
    return "tf32" if torch.backends.cuda.matmul.allow_tf32 else "tf32x3"
