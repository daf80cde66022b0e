"""Linear attention of a layer: Gated DeltaNet and Kimi Delta Attention, in chunks for training, by states in decoding.

The recurrence is in `ops/linear_attention.py`. A rank computes whole heads of whole sequences, or under context
parallelism of some segments of them, whose initial states come from `SequenceSegments`.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from moefold.config.model import ModelConfig
from moefold.model.activation_checkpoint import checkpoint_wrapper
from moefold.model.attention import TokenMixer
from moefold.model.linear import linear
from moefold.model.local_param import local_param
from moefold.model.norm import RMSNorm
from moefold.ops.documents import PackedDocuments
from moefold.ops.linear_attention import (
    ChunkedLinearAttention,
    InitialState,
    causal_convolution,
    l2_normalize,
    recurrent_linear_attention,
)
from moefold.ops.rope import NoRope, Rope


class SequenceSegments(ABC):
    """Segments of consecutive tokens of which this rank's part of a sequence consists, all of equal length."""

    num_segments: int
    """Segments of this rank, n."""
    initial_state: InitialState | None
    """The states before the segments, which count as samples: a batch of n*B; None: zeros."""

    @abstractmethod
    def positions(self, num_tokens: int, device: torch.device) -> Tensor:
        """Return the positions of this rank's tokens in their sample, int64 [num_tokens]."""

    @abstractmethod
    def previous_tokens(self, x_SBC: Tensor, num_tokens: int) -> Tensor:
        """Return the tokens right before each segment, [num_tokens, n*B, C], given the segments [S, n*B, C]."""


class WholeSequence(SequenceSegments):
    """One segment: the whole sequence."""

    num_segments = 1
    initial_state = None

    def positions(self, num_tokens: int, device: torch.device) -> Tensor:
        """Return all positions."""
        return torch.arange(num_tokens, device=device)

    def previous_tokens(self, x_SBC: Tensor, num_tokens: int) -> Tensor:
        """Return zeros: no token precedes the sequence."""
        return x_SBC.new_zeros(num_tokens, *x_SBC.shape[1:])


@dataclass(frozen=True)
class CachedStates:
    """Samples of one pass that continue from cached states, with equally many tokens each."""

    rows_R: Tensor
    """Rows of the pass: the tokens of the first sample, of the second and so on, int64 [n*S]."""
    slots_n: Tensor
    """Slots of the samples in the cache, int64 [n]."""
    previous_KnC: Tensor
    """Tokens before those of the pass, [K-1, n, C]."""
    state: Tensor
    """[n, A, D, Dv]."""
    num_previous_n: Tensor
    """Earlier tokens of each sample, int64 [n]."""


@dataclass(frozen=True)
class StateShapes:
    """Shapes of what is cached for one sample."""

    num_previous: int
    """Tokens before the next one that the convolutions read, K-1."""
    width: int
    """Channels of the convolutions, C."""
    state: tuple[int, int, int]
    """Value heads, width of a key and width of a value: [A, D, Dv]."""


class StateCacheProtocol(Protocol):
    """States and last tokens of the samples of a rank, in decoding."""

    def read(self, shapes: StateShapes, like: Tensor) -> Iterable[CachedStates]:
        """Yield the samples of the pass; zeros before a sample's first token.

        Args:
            shapes: of this layer.
            like: a tensor of the type and device of the tokens.
        """
        ...

    def write(self, samples: CachedStates, last_KnC: Tensor, state: Tensor) -> None:
        """Store the last tokens and states after the tokens of the pass."""
        ...


class LinearAttention(TokenMixer):
    """Base class of linear attention.

    `parallelize` also replaces `segments` (context parallelism), and a decoder sets `state_cache`. The recurrence is
    recomputed in the backward pass, always: it would save about twenty numbers for each one of its inputs.
    """

    def __init__(self) -> None:
        super().__init__()
        self.segments: SequenceSegments = WholeSequence()
        self.state_cache: StateCacheProtocol | None = None

    @abstractmethod
    def mix(self, projected: tuple[Tensor, ...], documents: PackedDocuments | None) -> Tensor:
        """Compute the recurrence of the projected tokens, [S/cp, B, ...] each -> [S/cp, B, A/tp * Dv]."""


class DeltaAttention(LinearAttention):
    """Delta rule with decays: convolution and L2 norm of queries and keys, recurrence, gated norm, output projection.

    The log decay is -exp(a_log) * softplus(a + dt_bias), of each head or of each of its key channels; the write
    strength sigmoid(wb x). Queries are scaled by 1/sqrt(D). The output of each head is normalised and multiplied by
    a function of the gate. A subclass computes a and the gate, and declares their weights.

    Args:
        cfg: sizes.
        window: 0.
    """

    dt_bias: nn.Parameter

    def __init__(self, cfg: ModelConfig, window: int = 0) -> None:
        super().__init__()
        assert not window, "linear attention has no window"
        hidden = cfg.hidden_size
        heads = cfg.linear_num_value_heads
        key = cfg.linear_num_key_heads * cfg.linear_key_head_dim
        value = heads * cfg.linear_value_head_dim
        taps = cfg.linear_conv_kernel
        self.key_head_dim = cfg.linear_key_head_dim
        self.value_head_dim = cfg.linear_value_head_dim
        self.wq = nn.Parameter(torch.empty(key, hidden))
        self.wk = nn.Parameter(torch.empty(key, hidden))
        self.wv = nn.Parameter(torch.empty(value, hidden))
        self.wb = nn.Parameter(torch.empty(heads, hidden))
        self.wo = nn.Parameter(torch.empty(hidden, value))
        self.conv_q = nn.Parameter(torch.empty(key, taps))
        self.conv_k = nn.Parameter(torch.empty(key, taps))
        self.conv_v = nn.Parameter(torch.empty(value, taps))
        self.a_log = nn.Parameter(torch.empty(heads))
        self.norm = RMSNorm(cfg.linear_value_head_dim, cfg.norm_eps)

    @abstractmethod
    def project(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return q, k, v, the gate, a and b of the gathered tokens, [S/cp, B, ...] each, from x [S/(cp*tp), B, H]."""

    @abstractmethod
    def activate_gate(self, gate: Tensor) -> Tensor:
        """Return the factor of the normalised output."""

    def forward(self, x: Tensor, rope: Rope | NoRope, documents: PackedDocuments | None = None) -> Tensor:
        """Compute the attention, as `TokenMixer.forward`; positions have no effect."""
        mixed = self.mix(self.project(x), documents)
        wo = local_param(self.wo, x.dtype)
        backend = self.kernels.linear_backend
        return self.sequence_parallel.linear_reduce_scatter(mixed, wo, self.wgrad_store, backend)

    def _columns(self, x: Tensor, *weights: Tensor) -> list[Tensor]:
        """Apply projections into the heads to the gathered tokens."""
        columns = [(local_param(weight, x.dtype), None) for weight in weights]
        return self.sequence_parallel.all_gather_linear(x, columns, self.wgrad_store, self.kernels.linear_backend)

    def mix(self, projected: tuple[Tensor, ...], documents: PackedDocuments | None) -> Tensor:
        """Compute convolution, recurrence and gated norm; see `LinearAttention.mix`."""
        if self.state_cache is not None:
            return self._continue(projected, self.state_cache)
        positions = self.segments.positions(len(projected[0]), projected[0].device)
        starts_SB = None if documents is None else documents.starts_SB
        dtype = projected[0].dtype
        weights = [local_param(w, dtype) for w in (self.conv_q, self.conv_k, self.conv_v, self.a_log, self.dt_bias)]
        out: Tensor = checkpoint_wrapper(self._train)(projected, weights, positions, starts_SB)
        return out

    def _train(
        self, projected: Sequence[Tensor], weights: Sequence[Tensor], positions: Tensor, starts_SB: Tensor | None
    ) -> Tensor:
        """Compute `mix` for whole sequences; recomputed in the backward pass."""
        q, k, v, gate, a, b = projected
        segments = self.segments
        *conv_weights, a_log, dt_bias = weights
        num_previous_SB = positions.unsqueeze(1).expand(-1, q.shape[1])
        if starts_SB is not None:
            num_previous_SB = num_previous_SB - starts_SB[positions]
        qkv, a, b, num_previous_SB = (
            _split_segments(x, segments.num_segments) for x in (torch.cat((q, k, v), -1), a, b, num_previous_SB)
        )
        previous = segments.previous_tokens(qkv, conv_weights[0].shape[1] - 1)
        query, key, value = self._convolve(qkv, torch.cat(conv_weights), previous, num_previous_SB)
        log_decay, beta = _gates(a, b, a_log, dt_bias)
        is_start_SB = None if starts_SB is None else num_previous_SB == 0
        chunked = ChunkedLinearAttention(initial_state=segments.initial_state, kernel=self.kernels.linear_attention)
        out, _ = chunked(query, key, value, log_decay, beta, is_start_SB=is_start_SB)
        return self._output(_join_segments(out, segments.num_segments), gate)

    def _convolve(
        self, qkv: Tensor, weight_CK: Tensor, previous: Tensor, num_previous_SB: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries and keys [S, B, G, D], normalised, and values [S, B, A, Dv]."""
        mixed = causal_convolution(qkv, weight_CK, previous, num_previous_SB)
        key_width = local_param(self.wk).shape[0]
        q, k, v = mixed.split((key_width, key_width, mixed.shape[-1] - 2 * key_width), -1)
        query, key = (l2_normalize(x.unflatten(-1, (-1, self.key_head_dim))) for x in (q, k))
        return query * self.key_head_dim**-0.5, key, v.unflatten(-1, (-1, self.value_head_dim))

    def _output(self, out: Tensor, gate: Tensor) -> Tensor:
        """Return the gated norm of the heads [S, B, A, Dv] -> [S, B, A * Dv], in the type of the gate."""
        normed = self.norm(out).flatten(2)
        return (normed * self.activate_gate(gate.to(normed.dtype))).to(gate.dtype)

    def _continue(self, projected: tuple[Tensor, ...], cache: StateCacheProtocol) -> Tensor:
        """Compute `mix` for the rows of a pass, [R, 1, ...], from cached states; no gradient."""
        q, k, v, gate, a, b = projected
        dtype = q.dtype
        qkv = torch.cat((q, k, v), -1).squeeze(1)
        weight_CK = torch.cat([local_param(weight, dtype) for weight in (self.conv_q, self.conv_k, self.conv_v)])
        a_log = local_param(self.a_log, dtype)
        dt_bias = local_param(self.dt_bias, dtype)
        num_heads = len(a_log)
        state_shape = (num_heads, self.key_head_dim, self.value_head_dim)
        shapes = StateShapes(weight_CK.shape[1] - 1, len(weight_CK), state_shape)
        out = qkv.new_zeros(len(qkv), num_heads, self.value_head_dim, dtype=torch.promote_types(dtype, torch.float32))
        for samples in cache.read(shapes, qkv):
            new, a_SB, b_SB = (
                x[samples.rows_R].unflatten(0, (len(samples.slots_n), -1)).transpose(0, 1)
                for x in (qkv, a.squeeze(1), b.squeeze(1))
            )
            distance = torch.arange(len(new), device=new.device).unsqueeze(1)
            num_previous_SB = samples.num_previous_n + distance
            parts = self._convolve(new, weight_CK, samples.previous_KnC, num_previous_SB)
            log_decay, beta = _gates(a_SB, b_SB, a_log, dt_bias)
            chunked = ChunkedLinearAttention(kernel=self.kernels.linear_attention)
            function = recurrent_linear_attention if len(new) == 1 else chunked
            found, state = function(*parts, log_decay, beta, samples.state)
            both = torch.cat((samples.previous_KnC, new))
            cache.write(samples, both[len(new) :], state)
            out[samples.rows_R] = found.transpose(0, 1).flatten(0, 1)
        return self._output(out.unsqueeze(1), gate)


class GatedDeltaNet(DeltaAttention):
    """Gated DeltaNet (arXiv:2412.06464): a decay for each head, a = wa x, and the gate SiLU(wg x)."""

    def __init__(self, cfg: ModelConfig, window: int = 0) -> None:
        super().__init__(cfg, window)
        heads = cfg.linear_num_value_heads
        self.wg = nn.Parameter(torch.empty(heads * cfg.linear_value_head_dim, cfg.hidden_size))
        self.wa = nn.Parameter(torch.empty(heads, cfg.hidden_size))
        self.dt_bias = nn.Parameter(torch.empty(heads))

    def project(self, x: Tensor) -> tuple[Tensor, ...]:
        """See base class; one all-gather over tp."""
        return tuple(self._columns(x, self.wq, self.wk, self.wv, self.wg, self.wa, self.wb))

    def activate_gate(self, gate: Tensor) -> Tensor:
        """Return SiLU of the gate."""
        return F.silu(gate)


class KimiDeltaAttention(DeltaAttention):
    """Kimi Delta Attention (arXiv:2510.26692): a decay for each key channel; decays and gate through low ranks.

    a = wa_up wa_down x and the gate sigmoid(wg_up wg_down x), with the width of a value head in between.
    """

    def __init__(self, cfg: ModelConfig, window: int = 0) -> None:
        super().__init__(cfg, window)
        rank = cfg.linear_value_head_dim
        channels = cfg.linear_num_value_heads * cfg.linear_key_head_dim
        self.wa_down = nn.Parameter(torch.empty(rank, cfg.hidden_size))
        self.wa_up = nn.Parameter(torch.empty(channels, rank))
        self.wg_down = nn.Parameter(torch.empty(rank, cfg.hidden_size))
        self.wg_up = nn.Parameter(torch.empty(cfg.linear_num_value_heads * cfg.linear_value_head_dim, rank))
        self.dt_bias = nn.Parameter(torch.empty(channels))

    def project(self, x: Tensor) -> tuple[Tensor, ...]:
        """See base class; the ranks of tp compute the low ranks of their own tokens, and gather them."""
        q, k, v, b = self._columns(x, self.wq, self.wk, self.wv, self.wb)
        backend = self.kernels.linear_backend
        a, gate = (
            self._columns(linear(x, local_param(down, x.dtype), None, self.wgrad_store, backend), up)[0]
            for down, up in ((self.wa_down, self.wa_up), (self.wg_down, self.wg_up))
        )
        return q, k, v, gate, a, b

    def activate_gate(self, gate: Tensor) -> Tensor:
        """Return the sigmoid of the gate."""
        return gate.sigmoid()


def _gates(a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """Return the log decay [S, B, A, 1 or D] and the write strength [S, B, A], in float32 at least."""
    dtype = torch.promote_types(a.dtype, torch.float32)
    rate_A1 = a_log.to(dtype).exp().unsqueeze(-1)
    time_steps = F.softplus(a.to(dtype) + dt_bias.to(dtype)).unflatten(-1, (len(a_log), -1))
    return -rate_A1 * time_steps, b.to(dtype).sigmoid()


def _split_segments(x: Tensor, num_segments: int) -> Tensor:
    """Return [S, B, ...] as [S/n, n*B, ...]: segments become samples."""
    return x if num_segments == 1 else x.unflatten(0, (num_segments, -1)).transpose(0, 1).flatten(1, 2)


def _join_segments(x: Tensor, num_segments: int) -> Tensor:
    """Return [S/n, n*B, ...] as [S, B, ...], the inverse of `_split_segments`."""
    return x if num_segments == 1 else x.unflatten(1, (num_segments, -1)).transpose(0, 1).flatten(0, 1)
