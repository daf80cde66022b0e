"""Gated short convolution (LFM2, arXiv:2511.23404): a causal convolution over few tokens between two gates."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from moefold.config.model import ModelConfig
from moefold.model.linear_attention import LinearAttention, PrecedingTokens, StateShapes
from moefold.model.local_param import local_param
from moefold.ops.linear_attention import causal_convolution


class ShortConvolution(LinearAttention):
    """Gated short convolution: wo ((wc x) * convolution((wb x) * (wv x))), as wide as the hidden state.

    The convolution is causal, of each channel, and starts from zeros at each document. There is no activation, no norm
    and no recurrence.

    Args:
        cfg: sizes.
        window: 0.
    """

    def __init__(self, cfg: ModelConfig, window: int = 0) -> None:
        super().__init__()
        assert not window, "a convolution has no window"
        hidden = cfg.hidden_size
        self.wb = nn.Parameter(torch.empty(hidden, hidden))
        self.wc = nn.Parameter(torch.empty(hidden, hidden))
        self.wv = nn.Parameter(torch.empty(hidden, hidden))
        self.conv = nn.Parameter(torch.empty(hidden, cfg.linear_conv_kernel))
        self.wo = nn.Parameter(torch.empty(hidden, hidden))

    def project(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return the gate before the convolution, the one after it, and the values; see base class."""
        return tuple(self.column_linear(x, self.wb, self.wc, self.wv))

    def core_weights(self, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """Return the convolution, [C, K]."""
        return (local_param(self.conv, dtype),)

    def state_shapes(self, weights: Sequence[Tensor]) -> StateShapes:
        """See base class."""
        width, num_taps = weights[0].shape
        return StateShapes(num_taps - 1, width, (0, 0, 0))

    def convolved(self, projected: Sequence[Tensor]) -> Tensor:
        """Return the gated values."""
        return projected[0] * projected[2]

    def compute(
        self, projected: Sequence[Tensor], weights: Sequence[Tensor], preceding: PrecedingTokens
    ) -> tuple[Tensor, None]:
        """Compute gates and convolution; see base class."""
        values = self.convolved(projected)
        kernel = self.kernels.convolution
        mixed = causal_convolution(values, weights[0], preceding.previous_KBC, preceding.num_previous_SB, kernel=kernel)
        return projected[1] * mixed, None
