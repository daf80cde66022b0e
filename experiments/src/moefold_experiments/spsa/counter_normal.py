"""Normal numbers from a counter: each depends on a key, a stream and its position alone, on any rank and device.

The generator is Philox4x32-10 (J. Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011) in tensor
operations, followed by the transformation of Box and Muller.
"""

import math
from typing import Any

import torch
from torch import Tensor

MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
NUM_ROUNDS = 10
LANES = 4
"""Words of 32 bits of one counter."""
_MASK = 0xFFFFFFFF
_UNIT = 2.0**-32


def philox(counter: tuple[Any, Any, Any, Any], key: Any) -> tuple[Any, Any, Any, Any]:
    """Compute Philox4x32-10, of integers or of each element of tensors.

    Args:
        counter: four words of 32 bits, lowest first: integers, or int64 tensors of shapes that broadcast.
        key: 64 bits: an integer, or int64 tensor.

    Returns:
        Four words of 32 bits, as integers or int64 tensors.
    """
    c0, c1, c2, c3 = counter
    k0 = key & _MASK
    k1 = key >> 32 & _MASK
    for _ in range(NUM_ROUNDS):
        # A product has 64 bits: int64 wraps around, and the mask drops the copies of the sign after the shift.
        low = c0 * MULTIPLIERS[0]
        high = c2 * MULTIPLIERS[1]
        c0 = (high >> 32 & _MASK) ^ c1 ^ k0
        c1 = high & _MASK
        c2 = (low >> 32 & _MASK) ^ c3 ^ k1
        c3 = low & _MASK
        k0 = k0 + KEY_STEPS[0] & _MASK
        k1 = k1 + KEY_STEPS[1] & _MASK
    return c0, c1, c2, c3


def uniform(key: int, stream: int) -> float:
    """Return one number between 0 and 1, both excluded."""
    return (philox((0, 0, stream, 0), key)[0] + 0.5) * _UNIT


def normal_rows(key: int | Tensor, stream: int, rows: Tensor, columns: slice) -> Tensor:
    """Return the normal numbers of some rows and columns of matrices, with mean 0 and variance 1.

    They are computed in float64 and rounded to float32, so that they do not depend on how a library vectorises
    logarithms and cosines, but for one number in 10**8.

    Args:
        key: 64 bits that name the matrix; int64 [R]: of each row.
        stream: number of the draw, below 2**32.
        rows: indices of the rows, int64 [R], each below 2**32.
        columns: first and last column.

    Returns:
        float32 [R, columns].
    """
    first = columns.start // LANES
    blocks = torch.arange(first, -(-columns.stop // LANES), device=rows.device)
    row_key = key[:, None] if isinstance(key, Tensor) else key
    w0, w1, w2, w3 = philox((blocks, rows[:, None], stream, 0), row_key)
    x0, x1 = _box_muller(w0, w1)
    x2, x3 = _box_muller(w2, w3)
    numbers = torch.stack((x0, x1, x2, x3), -1).flatten(1)
    return numbers[:, columns.start - first * LANES : columns.stop - first * LANES]


def _box_muller(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """Return two float32 tensors of independent normal numbers from words of 32 bits."""
    radius = ((first.double() + 0.5) * _UNIT).log_().mul_(-2).sqrt_()
    angle = second.double() * (2 * math.pi * _UNIT)
    return (radius * angle.cos()).float(), (radius * angle.sin_()).float()
