"""Dense gated feed-forward network: SwiGLU (arXiv:2002.05202)."""

import torch
from torch import Tensor, nn

from moefold.model.delayed_wgrad import WeightGradStoreProtocol
from moefold.model.kernels import TORCH_KERNELS, Kernels
from moefold.model.local_param import local_param
from moefold.model.lora import LowRankAdapters
from moefold.model.tp_interface import SequenceParallel
from moefold.ops.swiglu import swiglu


class SwiGLU(nn.Module):
    """Feed-forward w_down(silu(w_gate x) * (w_up x)): the dense layer, and the shared expert of an MoE layer."""

    def __init__(self, hidden_size: int, ffn_hidden_size: int) -> None:
        super().__init__()
        self.w_gate = nn.Parameter(torch.empty(ffn_hidden_size, hidden_size))
        self.w_up = nn.Parameter(torch.empty(ffn_hidden_size, hidden_size))
        self.w_down = nn.Parameter(torch.empty(hidden_size, ffn_hidden_size))
        self.sequence_parallel: SequenceParallel = SequenceParallel()
        self.wgrad_store: WeightGradStoreProtocol | None = None
        self.kernels: Kernels = TORCH_KERNELS
        self.lora: LowRankAdapters | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Compute the feed-forward, [S/(cp*tp), B, H] -> same. It communicates through `sequence_parallel`."""
        columns = [(local_param(weight, x.dtype), None) for weight in (self.w_gate, self.w_up)]
        gate, up = self.sequence_parallel.all_gather_linear(x, columns, self.wgrad_store, self.kernels.linear_backend)
        if self.lora is not None:
            gate, up = self.lora.add_columns((gate, up), x, ("w_gate", "w_up"), self.sequence_parallel)
        hidden = swiglu(gate, up, self.kernels.swiglu)
        w_down = local_param(self.w_down, x.dtype)
        y = self.sequence_parallel.linear_reduce_scatter(hidden, w_down, self.wgrad_store, self.kernels.linear_backend)
        return y if self.lora is None else self.lora.add_row(y, hidden, "w_down", self.sequence_parallel)
