"""Base class of linear attention by the delta rule with decays."""

from abc import abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from moefold.config.groups.attention import AttentionFrame
from moefold.config.groups.linear_attention import DeltaRulePart
from moefold.model.linear_attention import LinearAttention, PrecedingTokens
from moefold.model.local_param import local_param
from moefold.model.norm import RMSNorm
from moefold.model.recurrent_cache import StateShapes
from moefold.ops.linear_attention import causal_convolution, l2_normalize


class DeltaAttention(LinearAttention):
    """Delta rule with decays: convolution and L2 norm of queries and keys, recurrence, gated norm, output projection.

    The log decay of each head, or of each of its key channels, is -exp(a_log) * softplus(a + dt_bias), or with a lower
    bound l < 0 l * sigmoid(exp(a_log) * (a + dt_bias)). The write strength is sigmoid(wb x). Queries are scaled by
    1/sqrt(D). The output of each head is normalised and multiplied by a function of the gate. A subclass computes a and
    the gate, and declares their weights.
    """

    dt_bias: nn.Parameter

    def __init__(self, part: DeltaRulePart, frame: AttentionFrame) -> None:
        super().__init__()
        hidden = frame.hidden_size
        heads = part.num_value_heads
        key, value, taps = part.key_width, part.value_width, part.conv_kernel
        self.key_head_dim = part.key_head_dim
        self.value_head_dim = part.value_head_dim
        self.decay_bound = 0.0
        self.wq = nn.Parameter(torch.empty(key, hidden))
        self.wk = nn.Parameter(torch.empty(key, hidden))
        self.wv = nn.Parameter(torch.empty(value, hidden))
        self.wb = nn.Parameter(torch.empty(heads, hidden))
        self.wo = nn.Parameter(torch.empty(hidden, value))
        self.conv_q = nn.Parameter(torch.empty(key, taps))
        self.conv_k = nn.Parameter(torch.empty(key, taps))
        self.conv_v = nn.Parameter(torch.empty(value, taps))
        self.a_log = nn.Parameter(torch.empty(heads))
        self.norm = RMSNorm(part.value_head_dim, frame.norm_eps)

    @abstractmethod
    def activate_gate(self, gate: Tensor) -> Tensor:
        """Return the factor of the normalised output."""

    def core_weights(self, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """Return the convolution over queries, keys and values [C, K], a_log and dt_bias."""
        weight_CK = torch.cat([local_param(weight, dtype) for weight in (self.conv_q, self.conv_k, self.conv_v)])
        high = torch.promote_types(dtype, torch.float32)
        return weight_CK, local_param(self.a_log, high), local_param(self.dt_bias, high)

    def state_shapes(self, weights: Sequence[Tensor]) -> StateShapes:
        """See base class."""
        weight_CK, a_log, _ = weights
        state_shape = (len(a_log), self.key_head_dim, self.value_head_dim)
        return StateShapes(weight_CK.shape[1] - 1, len(weight_CK), state_shape)

    def convolved(self, projected: Sequence[Tensor]) -> Tensor:
        """Return queries, keys and values together."""
        return torch.cat(list(projected[:3]), -1)

    def compute(
        self, projected: Sequence[Tensor], weights: Sequence[Tensor], preceding: PrecedingTokens
    ) -> tuple[Tensor, Tensor]:
        """Compute convolution, recurrence and gated norm of q, k, v, the gate, a and b. See base class."""
        gate, a, b = projected[3:]
        weight_CK, a_log, dt_bias = weights
        convolved = self.convolved(projected)
        mixed = causal_convolution(
            convolved, weight_CK, preceding.previous_KBC, preceding.num_previous_SB, F.silu, self.kernels.convolution
        )
        key_width = projected[1].shape[-1]
        q, k, v = mixed.split((key_width, key_width, mixed.shape[-1] - 2 * key_width), -1)
        query, key = (l2_normalize(x.unflatten(-1, (-1, self.key_head_dim))) for x in (q, k))
        value = v.unflatten(-1, (-1, self.value_head_dim))
        log_decay, beta = self._gates(a, b, a_log, dt_bias)
        out, state = preceding.recurrence(query * self.key_head_dim**-0.5, key, value, log_decay, beta)
        normed = self.norm(out).flatten(2)
        return (normed * self.activate_gate(gate.to(normed.dtype))).to(gate.dtype), state

    def _gates(self, a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
        """Return the log decay [S, B, A, 1 or D] and the write strength [S, B, A], in float32 at least."""
        dtype = torch.promote_types(a.dtype, torch.float32)
        rate_A1 = a_log.to(dtype).exp().unsqueeze(-1)
        logits = (a.to(dtype) + dt_bias.to(dtype)).unflatten(-1, (len(a_log), -1))
        strength = b.to(dtype).sigmoid()
        if self.decay_bound:
            return self.decay_bound * (rate_A1 * logits).sigmoid(), strength
        return -rate_A1 * F.softplus(logits), strength
