"""The rotary embedding of the oracle, pair by pair, as the papers spell it; no line is shared with the trainer."""

import math

import torch
from torch import Tensor

from moefold.config.schema import ModelConfig


def apply_rope(model: ModelConfig, x: Tensor, rotary_dim: int) -> Tensor:
    """Turn each pair of the first `rotary_dim` dims of each head, [B, S, heads, D], at position p by p * its frequency.

    Pair i is dims (2i, 2i + 1) where pairs are interleaved, else (i, i + rotated/2).
    """
    half = rotary_dim // 2
    frequency = torch.tensor([_inv_freq(model, i, rotary_dim) for i in range(half)], dtype=torch.float64)
    angle = torch.arange(x.shape[1], dtype=torch.float64)[:, None] * frequency
    turn = torch.polar(torch.full_like(angle, _attention_factor(model)), angle)[:, None, :]
    if model.rope_interleaved:
        pairs = torch.view_as_complex(x[..., :rotary_dim].reshape(*x.shape[:-1], half, 2))
        turned = torch.view_as_real(pairs * turn).flatten(-2)
        return torch.cat((turned, x[..., rotary_dim:]), -1)
    pairs = torch.complex(x[..., :half], x[..., half:rotary_dim]) * turn
    return torch.cat((pairs.real, pairs.imag, x[..., rotary_dim:]), -1)


def yarn_mscale(factor: float, mscale: float) -> float:
    """The logarithmic rule of YaRN for a stretch by `factor`."""
    return 1 + mscale * math.log(factor) / 10


def _attention_factor(model: ModelConfig) -> float:
    if model.rope_scaling != "yarn":
        return 1.0
    if model.rope_attention_factor > 0:
        return model.rope_attention_factor
    factor = model.rope_scaling_factor
    if model.rope_mscale > 0:
        return yarn_mscale(factor, model.rope_mscale) / yarn_mscale(factor, model.rope_mscale_all_dim)
    return yarn_mscale(factor, 1.0)


def _inv_freq(model: ModelConfig, i: int, rotary_dim: int) -> float:
    frequency = 1.0 / model.rope_theta ** (2 * i / rotary_dim)
    if model.rope_scaling == "none":
        return frequency
    stretched = frequency / model.rope_scaling_factor
    if model.rope_scaling == "linear":
        return stretched
    if model.rope_scaling == "yarn":
        ramp = _yarn_ramp(model, i, rotary_dim)
        return stretched * ramp + frequency * (1 - ramp)
    wavelength = 2 * math.pi / frequency
    longest = model.rope_original_seq_len / model.rope_low_freq_factor
    shortest = model.rope_original_seq_len / model.rope_high_freq_factor
    if wavelength < shortest:
        return frequency
    if wavelength > longest:
        return stretched
    smooth = (model.rope_original_seq_len / wavelength - model.rope_low_freq_factor) / (
        model.rope_high_freq_factor - model.rope_low_freq_factor
    )
    return (1 - smooth) * stretched + smooth * frequency


def _yarn_ramp(model: ModelConfig, i: int, rotary_dim: int) -> float:
    """0 for a pair that turns often in the original context, 1 for one that turns seldom."""

    def dim_of(turns: float) -> float:
        # original * theta**(-2d/rotated) / (2 pi) = turns, solved for d.
        return rotary_dim / 2 * math.log(model.rope_original_seq_len / (turns * 2 * math.pi), model.rope_theta)

    low, high = dim_of(model.rope_beta_fast), dim_of(model.rope_beta_slow)
    if model.rope_truncate:
        low, high = float(math.floor(low)), float(math.ceil(high))
    low, high = max(0.0, low), min(high, rotary_dim - 1.0)
    if low == high:
        high = low + 0.001
    return min(1.0, max(0.0, (i - low) / (high - low)))
