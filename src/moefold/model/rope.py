"""Rotary position embedding (arXiv:2104.09864), partial and scaled, in the two-halves form of Llama."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from moefold.config.schema import ModelConfig


@dataclass(frozen=True)
class Rotation:
    """Cosines and sines of the positions of some tokens, each [S, 1 or B, 1, rotated dims]."""

    cos: Tensor
    sin: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        """Rotate the first dims of each head of x [S, B, heads, D]; the rest passes through."""
        rotated = self.cos.shape[-1]
        part = x[..., :rotated]
        first, second = part.chunk(2, dim=-1)
        turned = part * self.cos + torch.cat((-second, first), dim=-1) * self.sin
        return turned if rotated == x.shape[-1] else torch.cat((turned, x[..., rotated:]), dim=-1)


def rotation(cfg: ModelConfig, positions: Tensor, dtype: torch.dtype) -> Rotation:
    """The rotation of tokens at the given positions.

    Args:
        cfg: sizes, base and scaling.
        positions: counted from the start of the sample, int64 [S], or [S, B] where they differ between samples.
        dtype: type of the result; angles are computed in float64.
    """
    positions = positions.unsqueeze(1) if positions.dim() == 1 else positions
    angles = positions.to(torch.float64).unsqueeze(-1) * frequencies(cfg).to(positions.device)
    angles = torch.cat((angles, angles), dim=-1).unsqueeze(2)
    return Rotation(angles.cos().to(dtype), angles.sin().to(dtype))


def frequencies(cfg: ModelConfig) -> Tensor:
    """Angle per position of each rotated pair, float64 [rotated dims / 2], after scaling."""
    rotated = round(cfg.head_size * cfg.rope_fraction)
    plain = cfg.rope_theta ** (-torch.arange(0, rotated, 2, dtype=torch.float64) / rotated)
    if cfg.rope_scaling == "none":
        return plain
    if cfg.rope_scaling == "linear":
        return plain / cfg.rope_scaling_factor
    return _llama3(cfg, plain)


def _llama3(cfg: ModelConfig, plain: Tensor) -> Tensor:
    """Stretch long waves, keep short ones, blend between (Llama 3.1, arXiv:2407.21783)."""
    turns = cfg.rope_original_seq_len * plain / (2 * math.pi)
    span = cfg.rope_high_freq_factor - cfg.rope_low_freq_factor
    kept = ((turns - cfg.rope_low_freq_factor) / span).clamp(0.0, 1.0)
    return plain * (kept + (1 - kept) / cfg.rope_scaling_factor)
