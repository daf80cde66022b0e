"""Noise that depends on what it falls on, not on who draws it: the same under every mapping and when recomputed."""

import torch
from torch import Tensor

_GOLDEN = 0x9E3779B97F4A7C15
_MIX_A = 0xBF58476D1CE4E5B9
_MIX_B = 0x94D049BB133111EB
"""Of SplitMix64 (Steele, Lea, Flood 2014, doi:10.1145/2660193.2660195), as `data.random_bits` has them."""


def uniform_noise(seed: int, step: int, samples_B: Tensor, positions_S: Tensor, width: int) -> Tensor:
    """Uniform numbers in [0, 1) for each feature of each token, drawn by (seed, step, sample, position, feature).

    Args:
        seed: 64 bits, another for each layer.
        step: of the optimizer.
        samples_B: place of each sample in the global batch.
        positions_S: of the tokens in their sample.
        width: features of a token.

    Returns:
        float64 [S*B, width], sequence-first, on the device of samples_B.
    """
    features = torch.arange(1, width + 1, device=samples_B.device)
    key = torch.full((), _signed(seed), dtype=torch.int64, device=samples_B.device)
    key_B = _mix(_mix(key + _signed(step * _GOLDEN)) + samples_B * _signed(_GOLDEN))
    key_SB = _mix(key_B + (positions_S.unsqueeze(1) + 1) * _signed(_GOLDEN))
    bits = _mix(key_SB.flatten().unsqueeze(1) + features * _signed(_GOLDEN))
    return _shift(bits, 11).double() * 2.0**-53


def _mix(bits: Tensor) -> Tensor:
    """The finaliser: a bijection of 64 bits. int64 products wrap, which is what it needs."""
    bits = (bits ^ _shift(bits, 30)) * _signed(_MIX_A)
    bits = (bits ^ _shift(bits, 27)) * _signed(_MIX_B)
    return bits ^ _shift(bits, 31)


def _shift(bits: Tensor, count: int) -> Tensor:
    """Shift right and fill with zeros; torch shifts the sign in."""
    return (bits >> count) & ((1 << (64 - count)) - 1)


def _signed(value: int) -> int:
    """The int64 with the low 64 bits of `value`."""
    value &= 2**64 - 1
    return value - 2**64 if value >= 2**63 else value
