"""The gated feed-forward layer: SwiGLU (arXiv:2002.05202)."""

import torch
from torch import Tensor, nn

from moefold.model.gated import GateKernel, gated
from moefold.model.later import Later
from moefold.model.linear import Products, linear
from moefold.model.parameter import local
from moefold.model.seams import Tokens, WholeTokens


class SwiGLU(nn.Module):
    """w_down(silu(w_gate x) * (w_up x)); the dense layer, and the shared expert of an MoE layer."""

    def __init__(self, hidden_size: int, ffn_hidden_size: int) -> None:
        super().__init__()
        self.w_gate = nn.Parameter(torch.empty(ffn_hidden_size, hidden_size))
        self.w_up = nn.Parameter(torch.empty(ffn_hidden_size, hidden_size))
        self.w_down = nn.Parameter(torch.empty(hidden_size, ffn_hidden_size))
        self.tokens: Tokens = WholeTokens()
        self.later: Later | None = None
        self.products: Products | None = None
        self.gate_kernel: GateKernel | None = None

    def forward(self, x: Tensor) -> Tensor:
        """[S/(cp*tp), B, H] -> [S/(cp*tp), B, H]."""
        x = self.tokens.gather(x)
        gate = linear(x, local(self.w_gate, x.dtype), later=self.later, products=self.products)
        up = linear(x, local(self.w_up, x.dtype), later=self.later, products=self.products)
        hidden = gated(gate, up, self.gate_kernel)
        return self.tokens.scatter(
            linear(hidden, local(self.w_down, x.dtype), later=self.later, products=self.products)
        )
