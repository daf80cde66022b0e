"""Rotary position embedding of halves on CPU, written into its place: no copies, and nothing is kept of x."""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def rotate_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (i, i + R/2) of the first R dims of each head; the rest passes through.

    Args:
        x: [S, B, heads, D].
        cos: [S, 1 or B, 1, R], whose halves are equal; so for `sin`.
    """
    y: Tensor = _RotateHalves.apply(x, cos, sin)
    return y


class _RotateHalves(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.angles = cos, sin
        return _apply_rotation(x, cos, sin, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.angles
        return _apply_rotation(grad, cos, sin, -1), None, None


def _apply_rotation(x: Tensor, cos: Tensor, sin: Tensor, direction: int) -> Tensor:
    half = cos.shape[-1] // 2
    cos, sin = cos[..., :half], sin[..., :half]
    first, second, rest = x.tensor_split((half, 2 * half), dim=-1)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    y_first, y_second, y_rest = y.tensor_split((half, 2 * half), dim=-1)
    torch.mul(first, cos, out=y_first)
    y_first.addcmul_(second, sin, value=-direction)
    torch.mul(second, cos, out=y_second)
    y_second.addcmul_(first, sin, value=direction)
    if rest.shape[-1]:
        y_rest.copy_(rest)
    return y


class RopeKernel(Protocol):
    """What `RotaryEmbedding` does, as one kernel."""

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor, *, is_interleaved: bool) -> Tensor:
        """See `RotaryEmbedding`."""
        ...


@dataclass(frozen=True)
class Rope:
    """Cosines and sines of the positions of some tokens, each [S, 1 or B, 1, rotated dims]."""

    cos: Tensor
    sin: Tensor
    is_interleaved: bool = False
    """Pairs are neighbours."""
    kernel: RopeKernel | None = None
    """Turns in one pass."""

    def __call__(self, x: Tensor) -> Tensor:
        """Rotate the first dims of each head of x [S, B, heads, D]; the rest passes through.

        Of interleaved pairs the firsts come out before the seconds: another order of the dims, the same for queries
        and keys, so their products are the same.
        """
        if self.kernel is not None:
            return self.kernel(x, self.cos, self.sin, is_interleaved=self.is_interleaved)
        if x.device.type == "cpu" and not self.is_interleaved:
            return rotate_halves(x, self.cos, self.sin)
        rotated = self.cos.shape[-1]
        part = x[..., :rotated]
        if self.is_interleaved:
            part = torch.cat((part[..., ::2], part[..., 1::2]), dim=-1)
        first, second = part.chunk(2, dim=-1)
        turned = part * self.cos + torch.cat((-second, first), dim=-1) * self.sin
        return turned if rotated == x.shape[-1] else torch.cat((turned, x[..., rotated:]), dim=-1)
