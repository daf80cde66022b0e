"""The gated feed-forward layer: SwiGLU (arXiv:2002.05202)."""

import torch
from torch import Tensor, nn

from moefold.model.gated import GateKernel, gated
from moefold.model.later import Later
from moefold.model.linear import Products
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
        columns = [(local(weight, x.dtype), None) for weight in (self.w_gate, self.w_up)]
        gate, up = self.tokens.gathered_products(x, columns, self.later, self.products)
        hidden = gated(gate, up, self.gate_kernel)
        w_down = local(self.w_down, x.dtype)
        return self.tokens.scattered_product(hidden, w_down, self.later, self.products)
