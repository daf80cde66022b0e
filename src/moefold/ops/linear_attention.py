"""Gated linear attention: one recurrence for GLA, Gated DeltaNet and Kimi Delta Attention, in chunks and step by step.

Each head has a state S [D, Dv], a linear map from keys to values. For each token

    S <- diag(a) S                          a: decay, one number of a head or one of each key channel
    S <- S + k (b (v - S^T k))^T            delta rule, b: write strength (arXiv:2412.06464, arXiv:2510.26692)
    S <- S + k v^T                          without b: gated linear attention (arXiv:2312.06635)
    o = S^T q

`recurrent_linear_attention` is this definition, for decoding. `ChunkedLinearAttention` computes the same in chunks of C
tokens by matrix products, for training. Within a chunk the updates form a unit lower triangular system (WY
representation and UT transform, arXiv:2406.06484 sec. 3). Only the states between chunks are computed one after
another. Letters: A value heads, G key heads, N chunks, C tokens of a chunk. Sums are in float32 at least.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from moefold.config.groups.linear_attention import LINEAR_CHUNK_SIZE

SUB_CHUNK_SIZE = 16
"""Tokens between the reference points of decays of each channel. See `_ChannelDecays`."""

InitialState = Callable[[Tensor, Tensor], Tensor]
"""Return the states [B, A, D, Dv] before the tokens of this rank, from their transition [B, A, D, D] and update [B, A,
D, Dv]. A state S before these tokens becomes transition @ S + update after them."""


def recurrent_linear_attention(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor | None, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute gated linear attention token by token.

    Args:
        q: queries, [S, B, G, D]. Each serves A/G consecutive value heads.
        k: keys, [S, B, G, D].
        v: values, [S, B, A, Dv].
        log_decay: logarithm of the decay before each token, at most 0, [S, B, A, 1 or D].
        beta: write strength of the delta rule, [S, B, A], or None if there is no delta rule.
        state: [B, A, D, Dv], float32 at least. It is not changed.

    Returns:
        Outputs [S, B, A, Dv] in the type of the state, and the new state.
    """
    repeats = v.shape[2] // k.shape[2]
    dtype = state.dtype
    q_SBAD, k_SBAD = (x.to(dtype).repeat_interleave(repeats, 2) for x in (q, k))
    decay = log_decay.to(dtype).exp()
    outputs = []
    for t in range(len(q)):
        key = k_SBAD[t].unsqueeze(-1)
        written = v[t].to(dtype)
        state = state * decay[t].unsqueeze(-1)
        if beta is not None:
            predicted = (state * key).sum(-2)
            written = (written - predicted) * beta[t].to(dtype).unsqueeze(-1)
        state = state + key * written.unsqueeze(-2)
        outputs.append((state * q_SBAD[t].unsqueeze(-1)).sum(-2))
    return torch.stack(outputs) if outputs else v.new_zeros(v.shape, dtype=dtype), state


class PreparedChunks(Protocol):
    """Products within all chunks, which determine the states between the chunks and the outputs."""

    def summary(self) -> tuple[Tensor, Tensor]:
        """Return the transition [B, A, D, D] and update [B, A, D, Dv] of the states by all chunks."""
        ...

    def attend(self, state: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the outputs [S, B, A, Dv] and the last states, given the first states [B, A, D, Dv] or zeros."""
        ...


class ChunkKernel(Protocol):
    """Implementation of gated linear attention in chunks, differentiable."""

    def supports(self, inputs: Sequence[Tensor]) -> bool:
        """Return whether the kernel supports q, k, v, log_decay and maybe beta, by shapes and dtypes only."""
        ...

    def prepare(self, inputs: Sequence[Tensor], is_start_SB: Tensor | None, chunk_size: int) -> PreparedChunks:
        """Compute the products within the chunks, from q, k, v, log_decay and maybe beta, [S, B, heads, ...]."""
        ...


@dataclass(frozen=True)
class ChunkedLinearAttention:
    """Function that computes gated linear attention in chunks, with a gradient. Only `initial_state` communicates.

    Attributes:
        chunk_size: tokens of a chunk, C. It changes results only by rounding.
        initial_state: computes the states before the tokens from earlier tokens on other ranks, or None with `state`.
        kernel: implementation for the tensors that it supports. None means torch operations for all.
    """

    chunk_size: int = LINEAR_CHUNK_SIZE
    initial_state: InitialState | None = None
    kernel: ChunkKernel | None = None

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        log_decay: Tensor,
        beta: Tensor | None,
        state: Tensor | None = None,
        is_start_SB: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Compute the results of `recurrent_linear_attention`, which describes the other arguments.

        Args:
            state: the states before the first token, [B, A, D, Dv]. None means zeros, or the states of `initial_state`.
            is_start_SB: whether a document starts at a token, before which its state is zero, bool [S, B].

        Returns:
            Outputs [S, B, A, Dv] and the last states, both in float32 at least.
        """
        inputs = [q, k, v, log_decay] if beta is None else [q, k, v, log_decay, beta]
        kernel = self.kernel
        prepare = prepare_chunks if kernel is None or not kernel.supports(inputs) else kernel.prepare
        chunks = prepare(inputs, is_start_SB, self.chunk_size)
        if state is None and self.initial_state is not None:
            state = self.initial_state(*chunks.summary())
        return chunks.attend(state)


def prepare_chunks(inputs: Sequence[Tensor], is_start_SB: Tensor | None, chunk_size: int) -> "Chunks":
    """Compute the products within the chunks by torch operations. See `ChunkKernel`."""
    length = len(inputs[0])
    padding = -length % chunk_size
    if padding:
        # A padded token writes nothing, and its decay is 1.
        inputs = [torch.cat((x, x.new_zeros(padding, *x.shape[1:]))) for x in inputs]
        if is_start_SB is not None:
            is_start_SB = F.pad(is_start_SB, (0, 0, 0, padding))
    in_chunks = [_to_chunks(x, chunk_size) for x in inputs]
    return Chunks.prepare(in_chunks, _documents(is_start_SB, chunk_size), length)


@dataclass(frozen=True)
class _Documents:
    """Documents of the tokens of each chunk."""

    is_same: Tensor
    """True where two tokens of a chunk are of one document, bool [N, B, 1, C, C]."""
    is_first: Tensor
    """True where a token's document began before its chunk, bool [N, B, 1, C, 1]."""
    is_last: Tensor
    """True where a token is in the same document as the last token of its chunk, bool [N, B, 1, C, 1]."""


def _documents(is_start_SB: Tensor | None, size: int) -> _Documents | None:
    if is_start_SB is None:
        return None
    number = _to_chunks(is_start_SB.unsqueeze(-1), size).cumsum(-1).unsqueeze(-1)
    return _Documents(number == number.mT, number == 0, number == number[..., -1:, :])


def _to_chunks(x: Tensor, size: int) -> Tensor:
    """Return [S, B, A, ...] as [N, B, A, C, ...]."""
    return x.unflatten(0, (-1, size)).movedim(1, 3)


@dataclass(frozen=True)
class Chunks:
    """Products within the chunks, [N, B, A, C, ...]. The states between them follow from `scan`."""

    read_keys: Tensor
    """Queries with the decay since the start of the chunk, which read the state before it, [.., C, D]."""
    scores: Tensor
    """Products of queries and keys of a chunk, with the decay between them, lower triangular, [.., C, C]."""
    write_keys: Tensor
    """Keys with the decay up to the end of the chunk, [.., C, D]."""
    values: Tensor
    """Values that the tokens of a chunk write if the state before it is zero, [.., C, Dv]."""
    erase_keys: Tensor | None
    """[.., C, D]: the tokens write values + erase_keys @ state."""
    decay: Tensor
    """Decay of a state over the chunk, [.., 1 or D, 1]."""
    length: int
    """Tokens of the sequence, S."""

    @staticmethod
    def prepare(inputs: Sequence[Tensor], documents: _Documents | None, length: int) -> "Chunks":
        """Compute the products within the chunks, from q, k, v, log_decay and maybe beta, [N, B, heads, C, ...]."""
        dtype = torch.promote_types(inputs[2].dtype, torch.float32)
        q, k, v, log_decay, *betas = (x.to(dtype) for x in inputs)
        total = log_decay.cumsum(-2)
        repeats = v.shape[2] // k.shape[2]
        since_start = total.exp()
        to_end = (total[..., -1:, :] - total).exp()
        decay = total[..., -1, :].exp().unsqueeze(-1)
        if documents is not None:
            since_start = since_start * documents.is_first
            to_end = to_end * documents.is_last
            decay = decay * documents.is_first[..., -1:, :]
        is_same = None if documents is None else documents.is_same
        decays = _HeadDecays(total, is_same) if total.shape[-1] == 1 else _ChannelDecays(total, is_same)
        scores = decays.products(q, k, repeats)
        q, k_ = (x.repeat_interleave(repeats, 2) if repeats > 1 else x for x in (q, k))
        erase_keys = None
        if betas:
            strength = betas[0].unsqueeze(-1)
            system = decays.products(k, k, repeats) * strength
            right = torch.cat((v * strength, k_ * (-since_start * strength)), -1)
            # Entries on and above the diagonal are not read: the diagonal is 1.
            solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
            v, erase_keys = solved.split((v.shape[-1], k.shape[-1]), -1)
        return Chunks(q * since_start, scores, k_ * to_end, v, erase_keys, decay, length)

    def scan(self, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the states before the chunks [N, .., D, Dv], the written values [N, .., C, Dv], and the last state."""
        return _StateScan.apply(self.write_keys, self.values, self.erase_keys, self.decay, state)

    def summary(self) -> tuple[Tensor, Tensor]:
        """Return the transition [.., D, D] and update [.., D, Dv] of the states by all chunks."""
        values, state = self.padded_for_summary()
        sizes = (self.values.shape[-1], self.write_keys.shape[-1])
        update, transition = replace(self, values=values).scan(state)[2].split(sizes, -1)
        return transition, update

    def padded_for_summary(self) -> tuple[Tensor, Tensor]:
        """Return values [.., C, Dv + D] and first states [.., D, Dv + D] whose last states are update and transition.

        Columns that begin as the identity, and have no values of tokens, end as the transition.
        """
        key_size = self.write_keys.shape[-1]
        identity = torch.eye(key_size, dtype=self.values.dtype, device=self.values.device)
        state = F.pad(identity, (self.values.shape[-1], 0)).expand(*self.values.shape[1:3], -1, -1)
        return F.pad(self.values, (0, key_size)), state

    def first_state(self) -> Tensor:
        """Return states of zeros, [B, A, D, Dv]."""
        return self.values.new_zeros(*self.values.shape[1:3], self.read_keys.shape[-1], self.values.shape[-1])

    def tokens_of(self, x: Tensor) -> Tensor:
        """Return the tokens [S, B, A, Dv] of chunks [N, B, A, C, Dv], without padding."""
        return x.movedim(3, 1).flatten(0, 1)[: self.length]

    def attend(self, state: Tensor | None) -> tuple[Tensor, Tensor]:
        """See `PreparedChunks`."""
        states, written, last = self.scan(self.first_state() if state is None else state)
        out = self.read_keys @ states + self.scores @ written
        return self.tokens_of(out), last


class _HeadDecays:
    """Decays between the tokens of each chunk, one number for each head.

    Args:
        total: sum of the logarithms of the decays from the start of the chunk, [N, B, A, C, 1].
        is_same: whether two tokens are of one document, bool [N, B, 1, C, C], or None if all tokens are of one.
    """

    def __init__(self, total: Tensor, is_same: Tensor | None) -> None:
        size = total.shape[-2]
        is_visible = torch.ones(size, size, dtype=torch.bool, device=total.device).tril()
        if is_same is not None:
            is_visible = is_visible & is_same
        # Masked before exp, which could overflow above the diagonal.
        self._decay = (total - total.mT).masked_fill(~is_visible, float("-inf")).exp()

    def products(self, q: Tensor, k: Tensor, repeats: int) -> Tensor:
        """Return the products of queries and earlier keys with the decay between them, [N, B, A, C, C].

        Args:
            q: [N, B, G, C, D].
            k: [N, B, G, C, D].
            repeats: value heads of a key head, A/G.
        """
        products = q @ k.mT
        return (products.repeat_interleave(repeats, 2) if repeats > 1 else products) * self._decay


class _ChannelDecays:
    """Decays between the tokens of each chunk, one number for each key channel, as `_HeadDecays`, total [.., C, D].

    exp(total_i - total_j) is a product of two factors relative to a point between i and j, both at most 1. Queries are
    taken in sub-chunks: earlier keys relative to its start, and the keys of the sub-chunk itself channel by channel.
    """

    def __init__(self, total: Tensor, is_same: Tensor | None) -> None:
        self._total = total
        self._is_same = is_same
        size = total.shape[-2]
        self._spans = [slice(start, min(start + SUB_CHUNK_SIZE, size)) for start in range(0, size, SUB_CHUNK_SIZE)]
        self._inner = [self._inner_decay(total[..., span, :]) for span in self._spans]

    @staticmethod
    def _inner_decay(total: Tensor) -> Tensor:
        """Return the decays between the tokens of a sub-chunk, [.., queries, keys, D]."""
        size = total.shape[-2]
        is_later = torch.ones(size, size, dtype=torch.bool, device=total.device).triu(1)
        difference = total.unsqueeze(-2) - total.unsqueeze(-3)
        return difference.masked_fill(is_later.unsqueeze(-1), float("-inf")).exp()

    def products(self, q: Tensor, k: Tensor, repeats: int) -> Tensor:
        """Return the products of queries and earlier keys with the decays between them. See `_HeadDecays.products`."""
        if repeats > 1:
            q, k = (x.repeat_interleave(repeats, 2) for x in (q, k))
        total = self._total
        size = total.shape[-2]
        rows = []
        for span, decay in zip(self._spans, self._inner, strict=True):
            start = span.start
            queries = q[..., span, :]
            blocks = [((queries.unsqueeze(-2) * decay) * k[..., span, :].unsqueeze(-3)).sum(-1)]
            if start:
                reference = total[..., start - 1 : start, :]
                keys = k[..., :start, :] * (reference - total[..., :start, :]).exp()
                blocks.insert(0, queries * (total[..., span, :] - reference).exp() @ keys.mT)
            rows.append(F.pad(torch.cat(blocks, -1), (0, size - span.stop)))
        products = torch.cat(rows, -2)
        return products if self._is_same is None else products * self._is_same


class _StateScan(torch.autograd.Function):
    """Function of write_keys [N, B, A, C, D], values [.., C, Dv], erase_keys or None, decay [.., 1 or D, 1] and state.

    It returns the states before the chunks [N, B, A, D, Dv], the written values [.., C, Dv] and the last state.
    """

    @staticmethod
    def forward(
        ctx: Any, write_keys: Tensor, values: Tensor, erase_keys: Tensor | None, decay: Tensor, state: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        states = values.new_empty(len(values), *state.shape)
        written = values if erase_keys is None else torch.empty_like(values)
        for i, before in enumerate(states):
            before.copy_(state)
            if erase_keys is not None:
                torch.add(values[i], erase_keys[i] @ before, out=written[i])
            state = before * decay[i] + write_keys[i].mT @ written[i]
        if erase_keys is None:
            # An output must not be a view of an input.
            written = values.clone()
        ctx.save_for_backward(write_keys, erase_keys, decay, states, written)
        return states, written, state

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_states: Tensor, grad_written: Tensor, grad_last: Tensor) -> tuple[Tensor | None, ...]:
        write_keys, erase_keys, decay, states, written = ctx.saved_tensors
        # Gradients of the state after each chunk, and of the values that its tokens write.
        after = torch.empty_like(states)
        grad_values = torch.empty_like(written)
        grad = grad_last
        for i in reversed(range(len(states))):
            after[i] = grad
            torch.add(grad_written[i], write_keys[i] @ grad, out=grad_values[i])
            grad = grad_states[i] + decay[i] * grad
            if erase_keys is not None:
                grad = grad + erase_keys[i].mT @ grad_values[i]
        grad_keys = written @ after.mT
        grad_erase = None if erase_keys is None else grad_values @ states.mT
        grad_decay = (after * states).sum_to_size(decay.shape)
        return grad_keys, grad_values, grad_erase, grad_decay, grad


def l2_normalize(x: Tensor, eps: float = 1e-6) -> Tensor:
    """Divide vectors [..., D] by sqrt(their sum of squares + eps), in float32 at least."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + eps)


class ConvolutionKernel(Protocol):
    """Implementation of the short causal convolution, differentiable."""

    def supports(self, x_SBC: Tensor, weight_CK: Tensor) -> bool:
        """Return whether the kernel supports these tensors. It depends on shapes and dtypes only."""
        ...

    def __call__(
        self, x_SBC: Tensor, weight_CK: Tensor, previous_KBC: Tensor, num_previous_SB: Tensor, *, has_silu: bool
    ) -> Tensor:
        """Compute `causal_convolution`, with SiLU or without activation."""
        ...


def causal_convolution(
    x_SBC: Tensor,
    weight_CK: Tensor,
    previous_KBC: Tensor,
    num_previous_SB: Tensor,
    activation: Callable[[Tensor], Tensor] | None = None,
    kernel: ConvolutionKernel | None = None,
) -> Tensor:
    """Compute a short causal convolution of each channel. Taps are added in float32 at least and rounded once.

    Args:
        x_SBC: tokens, [S, B, C].
        weight_CK: [C, K], the last column for the token itself.
        previous_KBC: the K-1 tokens before the first token, [K-1, B, C].
        num_previous_SB: earlier tokens of each token's document, int64 [S, B]. Tokens before them do not count.
        activation: function of the sums before they are rounded.
        kernel: implementation for the tensors that it supports, without activation and with `F.silu`. None means torch
            operations for all.

    Returns:
        [S, B, C], in the type of the tokens.
    """
    has_silu = activation is F.silu
    if kernel is not None and (has_silu or activation is None) and kernel.supports(x_SBC, weight_CK):
        return kernel(x_SBC, weight_CK, previous_KBC, num_previous_SB, has_silu=has_silu)
    length = len(x_SBC)
    num_taps = weight_CK.shape[1]
    dtype = torch.promote_types(x_SBC.dtype, torch.float32)
    padded = torch.cat((previous_KBC, x_SBC))
    weight_CK = weight_CK.to(dtype)
    total = x_SBC * weight_CK[:, -1]
    for distance in range(1, num_taps):
        start = num_taps - 1 - distance
        is_inside = (num_previous_SB >= distance).unsqueeze(-1)
        total = total + padded[start : start + length] * is_inside * weight_CK[:, -1 - distance]
    return (total if activation is None else activation(total)).to(x_SBC.dtype)
