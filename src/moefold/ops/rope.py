"""Rotary position embedding (RoPE). On CPU half-split pairs are rotated without temporaries or tensors saved from x."""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def rotate_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (i, i + R/2) of the first R dims of each head. The other dims are copied.

    Args:
        x: [S, B, heads, D].
        cos: [S, 1 or B, 1, R], with equal halves.
        sin: same shape.
    """
    return _RotateHalves.apply(x, cos, sin)


def rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor, *, is_interleaved: bool) -> Tensor:
    """Compute `Rope.__call__` by PyTorch operations."""
    rotated = cos.shape[-1]
    half = rotated // 2
    rotated_x = x[..., :rotated]
    first, second = (rotated_x[..., ::2], rotated_x[..., 1::2]) if is_interleaved else rotated_x.chunk(2, dim=-1)
    cos = cos[..., :half]
    sin = sin[..., :half]
    return torch.cat((first * cos - second * sin, second * cos + first * sin, x[..., rotated:]), dim=-1)


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
    first, second, unrotated = x.tensor_split((half, 2 * half), dim=-1)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    y_first, y_second, y_rest = y.tensor_split((half, 2 * half), dim=-1)
    torch.mul(first, cos, out=y_first)
    y_first.addcmul_(second, sin, value=-direction)
    torch.mul(second, cos, out=y_second)
    y_second.addcmul_(first, sin, value=direction)
    if unrotated.shape[-1]:
        y_rest.copy_(unrotated)
    return y


class RopeKernel(Protocol):
    """Kernel that computes `Rope.__call__` in one pass."""

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor, *, is_interleaved: bool) -> Tensor:
        """See `Rope.__call__`."""
        ...


@dataclass(frozen=True)
class NoRope:
    """No position embedding (NoPE): leaves queries and keys unchanged."""

    positions: Tensor | None = None
    """Positions of the tokens, int64 [S, 1 or B], from the start of their sample or document, or None if not known."""
    query_scale: Tensor | None = None
    """Attention temperature: factor of the queries by position, float32 or float64 [S, 1 or B, 1, 1]. None means 1."""

    def __call__(self, x: Tensor) -> Tensor:
        """Return x [S, B, heads, D]."""
        return x

    def scale_queries(self, query: Tensor) -> Tensor:
        """Multiply queries [S, B, heads, D] by the factor of their position."""
        return query if self.query_scale is None else (query * self.query_scale).to(query.dtype)


NO_ROPE = NoRope()


@dataclass(frozen=True)
class Rope:
    """RoPE of given positions: cosines and sines, each [S, 1 or B, 1, rotated dims]."""

    cos: Tensor
    sin: Tensor
    is_interleaved: bool = False
    """True: pairs are neighbouring dims. False: dims i and i + R/2."""
    kernel: RopeKernel | None = None
    """Fused kernel. None: PyTorch operations."""
    no_rope: NoRope = NO_ROPE
    """The same positions in layers without RoPE."""

    @property
    def positions(self) -> Tensor | None:
        """Positions of the tokens, see `NoRope`."""
        return self.no_rope.positions

    def __call__(self, x: Tensor) -> Tensor:
        """Rotate the first dims of each head of x [S, B, heads, D]. The other dims are copied.

        With interleaved pairs the output has all first elements before all second elements: another order of dims, but
        the same for queries and keys, so their dot products are unchanged.
        """
        if self.kernel is not None:
            return self.kernel(x, self.cos, self.sin, is_interleaved=self.is_interleaved)
        if x.device.type == "cpu" and not self.is_interleaved:
            return rotate_halves(x, self.cos, self.sin)
        return rotate_pairs(x, self.cos, self.sin, is_interleaved=self.is_interleaved)
