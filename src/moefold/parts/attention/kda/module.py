"""Module of Kimi Delta Attention (arXiv:2510.26692)."""

import torch
from torch import Tensor, nn

from moefold.config.groups.attention import AttentionFrame
from moefold.model.delta_attention import DeltaAttention
from moefold.parts.attention.kda.part import KdaPart


class KimiDeltaAttention(DeltaAttention):
    """Kimi Delta Attention (arXiv:2510.26692): a decay for each key channel, and the gate sigmoid of a projection.

    Decays and gate are projected through low ranks, a = wa_up wa_down x and the gate wg_up wg_down x, or directly, wa x
    and wg x (`full_rank_gates`).
    """

    def __init__(self, part: KdaPart, frame: AttentionFrame) -> None:
        super().__init__(part, frame)
        hidden = frame.hidden_size
        channels, value = part.channels, part.value_width
        rank = 0 if part.full_rank_gates else part.value_head_dim
        self.decay_bound = part.decay_bound
        self.wa = None if rank else nn.Parameter(torch.empty(channels, hidden))
        self.wg = None if rank else nn.Parameter(torch.empty(value, hidden))
        self.wa_down = nn.Parameter(torch.empty(rank, hidden)) if rank else None
        self.wa_up = nn.Parameter(torch.empty(channels, rank)) if rank else None
        self.wg_down = nn.Parameter(torch.empty(rank, hidden)) if rank else None
        self.wg_up = nn.Parameter(torch.empty(value, rank)) if rank else None
        self.dt_bias = nn.Parameter(torch.empty(channels))

    def project(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return q, k, v, the gate, a and b. The ranks of tp compute low ranks of their own tokens, and gather them."""
        if self.wa is not None and self.wg is not None:
            return tuple(self.column_linear(x, self.wq, self.wk, self.wv, self.wg, self.wa, self.wb, num_unquantized=2))
        q, k, v, b = self.column_linear(x, self.wq, self.wk, self.wv, self.wb, num_unquantized=1)
        parts = []
        for down, up in ((self.wg_down, self.wg_up), (self.wa_down, self.wa_up)):
            assert down is not None
            assert up is not None
            parts.append(self.low_rank_linear(x, down, up))
        return q, k, v, *parts, b

    def activate_gate(self, gate: Tensor) -> Tensor:
        """Return the sigmoid of the gate."""
        return gate.sigmoid()
