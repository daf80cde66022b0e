"""Gated linear attention (GLA, arXiv:2312.06635 sec. 4): a recurrence with a decay for each key channel."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from moefold.config.groups.attention import AttentionFrame
from moefold.model.linear_attention import LinearAttention, PrecedingTokens
from moefold.model.local_param import local_param
from moefold.model.norm import RMSNorm
from moefold.model.recurrent_cache import StateShapes
from moefold.parts.attention.gla.part import GlaPart

DECAY_TEMPERATURE = 16.0
"""Temperature of the decays, which brings them near 1 (arXiv:2312.06635 sec. 4.4)."""


class GatedLinearAttention(LinearAttention):
    """Gated linear attention: projections, recurrence, norm of each head, SiLU gate, output projection.

    The decay of a key channel is sigmoid(wa_up wa_down x + ba)^(1/16), and queries are scaled by 1/sqrt(D). There is no
    convolution, no norm of queries and keys and no delta rule.
    """

    def __init__(self, part: GlaPart, frame: AttentionFrame) -> None:
        super().__init__()
        hidden = frame.hidden_size
        key, value, rank = part.key_width, part.value_width, part.gate_rank
        self.key_head_dim = part.key_head_dim
        self.value_head_dim = part.value_head_dim
        self.wq = nn.Parameter(torch.empty(key, hidden))
        self.wk = nn.Parameter(torch.empty(key, hidden))
        self.wv = nn.Parameter(torch.empty(value, hidden))
        self.wg = nn.Parameter(torch.empty(value, hidden))
        self.wa_down = nn.Parameter(torch.empty(rank, hidden))
        self.wa_up = nn.Parameter(torch.empty(part.channels, rank))
        self.ba = nn.Parameter(torch.empty(part.channels))
        self.wo = nn.Parameter(torch.empty(hidden, value))
        self.norm = RMSNorm(part.value_head_dim, frame.norm_eps)

    def project(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return q, k, v, the gate and the logits of the decays without their bias. See base class."""
        q, k, v, gate = self.column_linear(x, self.wq, self.wk, self.wv, self.wg)
        return q, k, v, gate, self.low_rank_linear(x, self.wa_down, self.wa_up)

    def core_weights(self, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """Return the bias of the decays."""
        return (local_param(self.ba, torch.promote_types(dtype, torch.float32)),)

    def state_shapes(self, weights: Sequence[Tensor]) -> StateShapes:
        """See base class."""
        num_heads = len(weights[0]) // self.key_head_dim
        return StateShapes(0, 0, (num_heads, self.key_head_dim, self.value_head_dim))

    def compute(
        self, projected: Sequence[Tensor], weights: Sequence[Tensor], preceding: PrecedingTokens
    ) -> tuple[Tensor, Tensor]:
        """Compute recurrence, norm and gate. See base class."""
        q, k, v, gate, logits = projected
        dtype = torch.promote_types(q.dtype, torch.float32)
        log_decay = F.logsigmoid(logits.to(dtype) + weights[0].to(dtype)) / DECAY_TEMPERATURE
        query, key, log_decay = (x.unflatten(-1, (-1, self.key_head_dim)) for x in (q, k, log_decay))
        value = v.unflatten(-1, (-1, self.value_head_dim))
        out, state = preceding.recurrence(query * self.key_head_dim**-0.5, key, value, log_decay, None)
        normed = self.norm(out).flatten(2)
        return (normed * F.silu(gate.to(normed.dtype))).to(gate.dtype), state
