"""Counter-based noise for each token: equal under every mapping and when recomputed.

It depends on seed, step, sample and position of the token, and not on the rank.
"""

import torch
from torch import Tensor

from moefold.integer_hash import GOLDEN, MIX_A, MIX_B

SECOND_STREAM = MIX_A
"""XOR of a seed with it gives the seed of independent noise. Seeds at a multiple of `GOLDEN` belong to other steps."""

CPU_CHUNK_ELEMENTS = 1 << 15
GPU_CHUNK_ELEMENTS = 1 << 22
"""Noise values computed at a time: on a CPU as many as fit a core's cache, on a GPU enough to keep it busy."""


def uniform_noise(
    seed: int,
    step: int | Tensor,
    sample_ids_B: Tensor,
    positions_S: Tensor,
    width: int,
    *,
    scale: float = 1.0,
    shift: float = 0.0,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """Return shift + scale * u with u uniform in [0, 1), a hash of (seed, step, sample, position, feature).

    Temporaries are limited to a chunk of rows: the 64-bit hashes of all elements are never in memory at once.

    Args:
        seed: 64 bits, different for each layer.
        step: optimizer step, or the same as a 0-dim int64 tensor on the device of sample_ids_B, which gives the same
            noise.
        sample_ids_B: index of each sample in the global batch, or of the sample of each row, [rows, 1].
        positions_S: positions of the tokens in their sample, or of each row, [rows].
        dtype: dtype of the result. Each value is rounded to it once, from float64.

    Returns:
        [S*B, width], sequence-first, or [rows, width], on the device of sample_ids_B.
    """
    device = sample_ids_B.device
    features = torch.arange(1, width + 1, device=device) * _signed(GOLDEN)
    key = torch.full((), _signed(seed), dtype=torch.int64, device=device)
    # Products of int64 tensors wrap around, as `_signed` does.
    step_key = step * _signed(GOLDEN) if isinstance(step, Tensor) else _signed(step * GOLDEN)
    key_B = _mix(_mix(key + step_key) + sample_ids_B * _signed(GOLDEN))
    key_T = _mix(key_B + (positions_S.unsqueeze(1) + 1) * _signed(GOLDEN)).flatten()
    noise = torch.empty(len(key_T), width, dtype=dtype, device=device)
    rows = max(1, (CPU_CHUNK_ELEMENTS if device.type == "cpu" else GPU_CHUNK_ELEMENTS) // max(1, width))
    for chunk, out in zip(key_T.split(rows), noise.split(rows), strict=True):
        bits = _shift_(_mix(chunk.unsqueeze(1) + features), 11)
        # A power of two scales without rounding.
        out.copy_(bits.double().mul_(scale * 2.0**-53).add_(shift))
    return noise


def _mix(bits: Tensor) -> Tensor:
    """Apply SplitMix64's finaliser, a bijection of 64 bits, in place. It relies on wrap-around of int64 products."""
    bits.bitwise_xor_(_shift_(bits.clone(), 30)).mul_(_signed(MIX_A))
    bits.bitwise_xor_(_shift_(bits.clone(), 27)).mul_(_signed(MIX_B))
    return bits.bitwise_xor_(_shift_(bits.clone(), 31))


def _shift_(bits: Tensor, count: int) -> Tensor:
    """Shift right in place and fill with zeros. torch's shift extends the sign."""
    return bits.bitwise_right_shift_(count).bitwise_and_((1 << (64 - count)) - 1)


def _signed(value: int) -> int:
    """Return the int64 with the low 64 bits of `value`."""
    value &= 2**64 - 1
    return value - 2**64 if value >= 2**63 else value
