"""Gated short convolution (LFM2, arXiv:2511.23404): a causal convolution over few tokens between two gates."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from moefold.config.groups.attention import AttentionFrame
from moefold.model.linear_attention import LinearAttention, PrecedingTokens
from moefold.model.local_param import local_param
from moefold.model.recurrent_cache import StateShapes
from moefold.ops.documents import PackedDocuments
from moefold.ops.linear_attention import causal_convolution
from moefold.ops.rope import NoRope, Rope
from moefold.parts.attention.short_convolution.part import ShortConvolutionPart


class ShortConvolution(LinearAttention):
    """Gated short convolution: wo ((wc x) * convolution((wb x) * (wv x))), as wide as the hidden state.

    With biases, each projection and the convolution has a bias. The convolution is causal, for each channel separately,
    and starts from zeros at each document. There is no activation, no norm and no recurrence.
    """

    def __init__(self, part: ShortConvolutionPart, frame: AttentionFrame) -> None:
        super().__init__()
        hidden = frame.hidden_size
        self.wb = nn.Parameter(torch.empty(hidden, hidden))
        self.wc = nn.Parameter(torch.empty(hidden, hidden))
        self.wv = nn.Parameter(torch.empty(hidden, hidden))
        self.conv = nn.Parameter(torch.empty(hidden, part.conv_kernel))
        self.wo = nn.Parameter(torch.empty(hidden, hidden))
        has_bias = part.bias
        self.bb = nn.Parameter(torch.empty(hidden)) if has_bias else None
        self.bc = nn.Parameter(torch.empty(hidden)) if has_bias else None
        self.bv = nn.Parameter(torch.empty(hidden)) if has_bias else None
        self.conv_bias = nn.Parameter(torch.empty(hidden)) if has_bias else None
        self.bo = nn.Parameter(torch.empty(hidden)) if has_bias else None

    def project(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return the gate before the convolution, the gate after it, and the values. See base class."""
        columns = [
            (local_param(weight, x.dtype), None if bias is None else local_param(bias, x.dtype))
            for weight, bias in ((self.wb, self.bb), (self.wc, self.bc), (self.wv, self.bv))
        ]
        backend = self.kernels.linear_backend
        return tuple(self.sequence_parallel.all_gather_linear(x, columns, self.wgrad_store, backend))

    def core_weights(self, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """Return the convolution, [C, K], and its bias, [C], if it has a bias."""
        bias = () if self.conv_bias is None else (local_param(self.conv_bias, dtype),)
        return (local_param(self.conv, dtype), *bias)

    def state_shapes(self, weights: Sequence[Tensor]) -> StateShapes:
        """See base class."""
        width, num_taps = weights[0].shape
        return StateShapes(num_taps - 1, width, (0, 0, 0))

    def convolved(self, projected: Sequence[Tensor]) -> Tensor:
        """Multiply the values by their input gate, before the convolution."""
        return projected[0] * projected[2]

    def compute(
        self, projected: Sequence[Tensor], weights: Sequence[Tensor], preceding: PrecedingTokens
    ) -> tuple[Tensor, None]:
        """Compute gates and convolution. See base class."""
        values = self.convolved(projected)
        kernel = self.kernels.convolution
        mixed = causal_convolution(values, weights[0], preceding.previous_KBC, preceding.num_previous_SB, kernel=kernel)
        if len(weights) > 1:
            mixed = mixed + weights[1]
        return projected[1] * mixed, None

    def forward(self, x: Tensor, rope: Rope | NoRope, documents: PackedDocuments | None = None) -> Tensor:
        """Compute the layer. See base class."""
        y = super().forward(x, rope, documents)
        return y if self.bo is None else y + local_param(self.bo, x.dtype)
