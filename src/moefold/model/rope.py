"""Rotary position embedding (arXiv:2104.09864), partial and scaled, with pairs of halves or of neighbours."""

import math

import torch
from torch import Tensor

from moefold.config.schema import ModelConfig
from moefold.ops.rope import Rope, RopeKernel


def build_rope(cfg: ModelConfig, positions: Tensor, dtype: torch.dtype, kernel: RopeKernel | None = None) -> Rope:
    """The rotation of tokens at the given positions.

    Args:
        cfg: sizes, base and scaling.
        positions: int64 [S], counted from the start of the sample, or [S, B], each from the start of its document.
        dtype: type of the result; angles are computed in float64.
        kernel: turns in one pass; None: plain operations.
    """
    positions_SB = positions.unsqueeze(1) if positions.dim() == 1 else positions
    angles = positions_SB.to(torch.float64)[:, :, None, None] * frequencies(cfg).to(positions.device)
    angles = torch.cat((angles, angles), dim=-1)
    scale = attention_factor(cfg)
    return Rope((scale * angles.cos()).to(dtype), (scale * angles.sin()).to(dtype), cfg.rope_interleaved, kernel)


def frequencies(cfg: ModelConfig) -> Tensor:
    """Angle per position of each rotated pair, float64 [rotated dims / 2], after scaling."""
    rotated = cfg.rotary_dim
    plain = cfg.rope_theta ** (-torch.arange(0, rotated, 2, dtype=torch.float64) / rotated)
    if cfg.rope_scaling == "none":
        return plain
    if cfg.rope_scaling == "linear":
        return plain / cfg.rope_scaling_factor
    return _yarn(cfg, plain) if cfg.rope_scaling == "yarn" else _llama3(cfg, plain)


def attention_factor(cfg: ModelConfig) -> float:
    """Factor of the rotated parts of queries and keys: the temperature of YaRN (arXiv:2309.00071 sec. 3.4)."""
    if cfg.rope_scaling != "yarn":
        return 1.0
    if cfg.rope_attention_factor:
        return cfg.rope_attention_factor
    if cfg.rope_mscale and cfg.rope_mscale_all_dim:
        return _temperature(cfg, cfg.rope_mscale) / _temperature(cfg, cfg.rope_mscale_all_dim)
    return _temperature(cfg, 1.0)


def softmax_factor(cfg: ModelConfig) -> float:
    """Factor of the scores of latent attention beside 1/sqrt(D): the temperature on all dims, squared (DeepSeek-V2)."""
    if cfg.rope_scaling != "yarn" or not cfg.rope_mscale_all_dim:
        return 1.0
    return _temperature(cfg, cfg.rope_mscale_all_dim) ** 2


def _temperature(cfg: ModelConfig, weight: float) -> float:
    return 0.1 * weight * math.log(cfg.rope_scaling_factor) + 1.0


def _yarn(cfg: ModelConfig, plain: Tensor) -> Tensor:
    """Stretch the pairs that turn seldom, keep those that turn often, blend between (arXiv:2309.00071 sec. 3.2)."""
    pairs = len(plain)

    def pair_that_turns(times: float) -> float:
        """The pair, a fraction included, that turns so many times in the original context."""
        return pairs * math.log(cfg.rope_original_seq_len / (2 * math.pi * times)) / math.log(cfg.rope_theta)

    first = pair_that_turns(cfg.rope_beta_fast)
    last = pair_that_turns(cfg.rope_beta_slow)
    if cfg.rope_truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * pairs - 1)
    # The smallest width is that of transformers: a blend within one pair.
    stretched = ((torch.arange(pairs, dtype=torch.float64) - first) / ((last - first) or 0.001)).clamp(0.0, 1.0)
    return plain * (1 - stretched + stretched / cfg.rope_scaling_factor)


def _llama3(cfg: ModelConfig, plain: Tensor) -> Tensor:
    """Stretch long waves, keep short ones, blend between (Llama 3.1, arXiv:2407.21783)."""
    turns = cfg.rope_original_seq_len * plain / (2 * math.pi)
    span = cfg.rope_high_freq_factor - cfg.rope_low_freq_factor
    kept = ((turns - cfg.rope_low_freq_factor) / span).clamp(0.0, 1.0)
    return plain * (kept + (1 - kept) / cfg.rope_scaling_factor)
