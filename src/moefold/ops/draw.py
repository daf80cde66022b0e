"""Interface of kernels that draw tokens from logits; the reference is `inference/engine/draw.py`."""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

SUM_BITS = 62
"""Bits of the sum of the weights of a row."""
NO_TOKEN = -1
"""Token id of a row whose logits are NaN or infinite."""


def weight_unit(num_tokens: int) -> float:
    """Return the largest weight of a row, a power of two: the sum of the row is below 2^SUM_BITS."""
    return 2.0 ** (SUM_BITS - num_tokens.bit_length())


class DrawKernel(Protocol):
    """Draws from whole distributions: without top-k, top-p and min-p."""

    def supports(self, logits_NV: Tensor) -> bool:
        """Return whether the kernel supports these logits; depends on their layout only."""
        ...

    def __call__(self, logits_NV: Tensor, temperature: float, uniforms: Sequence[float]) -> Tensor:
        """Draw a token for each row: int64 [N], `NO_TOKEN` for a row with NaN or infinity.

        Args:
            logits_NV: logits over the whole vocabulary.
            temperature: divisor of the logits; 0: the first of the largest logits.
            uniforms: number in [0, 1) for each row; not read at temperature 0.
        """
        ...
