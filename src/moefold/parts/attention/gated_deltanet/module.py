"""Module of Gated DeltaNet (arXiv:2412.06464)."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from moefold.config.groups.attention import AttentionFrame
from moefold.model.delta_attention import DeltaAttention
from moefold.parts.attention.gated_deltanet.part import GatedDeltaNetPart


class GatedDeltaNet(DeltaAttention):
    """Gated DeltaNet (arXiv:2412.06464): a decay for each head, a = wa x, and the gate SiLU(wg x)."""

    def __init__(self, part: GatedDeltaNetPart, frame: AttentionFrame) -> None:
        super().__init__(part, frame)
        heads = part.num_value_heads
        self.wg = nn.Parameter(torch.empty(part.value_width, frame.hidden_size))
        self.wa = nn.Parameter(torch.empty(heads, frame.hidden_size))
        self.dt_bias = nn.Parameter(torch.empty(heads))

    def project(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return q, k, v, the gate, a and b. See base class."""
        return tuple(self.column_linear(x, self.wq, self.wk, self.wv, self.wg, self.wa, self.wb, num_unquantized=2))

    def activate_gate(self, gate: Tensor) -> Tensor:
        """Return SiLU of the gate."""
        return F.silu(gate)
