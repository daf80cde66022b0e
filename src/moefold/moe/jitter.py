"""Noise that depends on what it falls on, not on who draws it: the same under every mapping and when recomputed."""

import torch
from torch import Tensor

_GOLDEN = 0x9E3779B97F4A7C15
_MIX_A = 0xBF58476D1CE4E5B9
_MIX_B = 0x94D049BB133111EB
"""Of SplitMix64 (Steele, Lea, Flood 2014, doi:10.1145/2660193.2660195), as `data.random_bits` has them."""


CPU_CHUNK_ELEMENTS, GPU_CHUNK_ELEMENTS = 1 << 15, 1 << 22
"""So many numbers are made at a time: on a CPU what stays in a core's cache, on a GPU what keeps it busy."""


def uniform_noise(
    seed: int,
    step: int,
    sample_ids_B: Tensor,
    positions_S: Tensor,
    width: int,
    *,
    scale: float = 1.0,
    shift: float = 0.0,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """Numbers shift + scale * u with u uniform in [0, 1), drawn by (seed, step, sample, position, feature).

    Beside the result, a chunk of rows is in memory at a time, not the 64 bits of every number.

    Args:
        seed: 64 bits, another for each layer.
        step: of the optimizer.
        sample_ids_B: place of each sample in the global batch.
        positions_S: of the tokens in their sample.
        width: features of a token.
        scale: of the numbers.
        shift: of the numbers.
        dtype: of the result; each number is rounded to it once, from float64.

    Returns:
        [S*B, width], sequence-first, on the device of samples_B.
    """
    device = sample_ids_B.device
    features = torch.arange(1, width + 1, device=device) * _signed(_GOLDEN)
    key = torch.full((), _signed(seed), dtype=torch.int64, device=device)
    key_B = _mix(_mix(key + _signed(step * _GOLDEN)) + sample_ids_B * _signed(_GOLDEN))
    key_T = _mix(key_B + (positions_S.unsqueeze(1) + 1) * _signed(_GOLDEN)).flatten()
    noise = torch.empty(len(key_T), width, dtype=dtype, device=device)
    rows = max(1, (CPU_CHUNK_ELEMENTS if device.type == "cpu" else GPU_CHUNK_ELEMENTS) // max(1, width))
    for chunk, out in zip(key_T.split(rows), noise.split(rows), strict=True):
        bits = _shift_(_mix(chunk.unsqueeze(1) + features), 11)
        # A power of two scales without rounding.
        out.copy_(bits.double().mul_(scale * 2.0**-53).add_(shift))
    return noise


def _mix(bits: Tensor) -> Tensor:
    """The finaliser: a bijection of 64 bits, in place. int64 products wrap, which is what it needs."""
    bits.bitwise_xor_(_shift_(bits.clone(), 30)).mul_(_signed(_MIX_A))
    bits.bitwise_xor_(_shift_(bits.clone(), 27)).mul_(_signed(_MIX_B))
    return bits.bitwise_xor_(_shift_(bits.clone(), 31))


def _shift_(bits: Tensor, count: int) -> Tensor:
    """Shift right in place and fill with zeros; torch shifts the sign in."""
    return bits.bitwise_right_shift_(count).bitwise_and_((1 << (64 - count)) - 1)


def _signed(value: int) -> int:
    """The int64 with the low 64 bits of `value`."""
    value &= 2**64 - 1
    return value - 2**64 if value >= 2**63 else value
