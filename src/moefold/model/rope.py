"""Rotary position embedding (RoPE, arXiv:2104.09864), partial and scaled, half-split or interleaved."""

import math

import torch
from torch import Tensor

from moefold.config.model import ModelConfig
from moefold.ops.rope import NO_ROPE, NoRope, Rope, RopeKernel


def build_rope(
    cfg: ModelConfig,
    positions: Tensor,
    dtype: torch.dtype,
    kernel: RopeKernel | None = None,
    frequencies: Tensor | None = None,
    seq_len: int = 0,
) -> Rope:
    """Build the RoPE of tokens at the given positions.

    Args:
        cfg: sizes, base and scaling.
        positions: int64 [S], counted from the start of the sample, or [S, B], each from the start of its document.
        dtype: dtype of the result; angles are computed in float64.
        kernel: fused RoPE kernel; None: PyTorch operations.
        frequencies: `rope_frequencies` on the device of the positions, so that the host need not wait for their copy;
            None: computed and copied.
        seq_len: as of `rope_frequencies`.
    """
    if frequencies is None:
        frequencies = rope_frequencies(cfg, seq_len).to(positions.device)
    positions_SB = positions.unsqueeze(1) if positions.dim() == 1 else positions
    angles = positions_SB.to(torch.float64)[:, :, None, None] * frequencies
    angles = torch.cat((angles, angles), dim=-1)
    scale = attention_factor(cfg, seq_len)
    cos = (scale * angles.cos()).to(dtype)
    sin = (scale * angles.sin()).to(dtype)
    return Rope(cos, sin, cfg.rope_interleaved, kernel, _temperature_without_rope(cfg, positions_SB, dtype))


def _temperature_without_rope(cfg: ModelConfig, positions_SB: Tensor, dtype: torch.dtype) -> NoRope:
    """Return the attention temperature of layers without RoPE at some positions (arXiv:2501.19399, Llama 4)."""
    if not cfg.nope_temperature_scale:
        return NO_ROPE
    steps_SB = (positions_SB + 1) // cfg.nope_temperature_tokens
    scale_SB = 1 + cfg.nope_temperature_scale * steps_SB.to(torch.float64).log1p()
    return NoRope(scale_SB[:, :, None, None].to(torch.promote_types(dtype, torch.float32)))


def rope_frequencies(cfg: ModelConfig, seq_len: int = 0) -> Tensor:
    """Return the angle per position of each rotated pair, float64 [rotated dims / 2], after scaling.

    Args:
        cfg: sizes, base and scaling.
        seq_len: tokens of the longest sequence, by which LongRoPE selects its factors; 0: within the original context.
    """
    rotated = cfg.rotary_dim
    theta = cfg.rope_theta
    if cfg.rope_scaling == "ntk":
        theta *= cfg.rope_scaling_factor ** (rotated / (rotated - 2))
    unscaled = theta ** (-torch.arange(0, rotated, 2, dtype=torch.float64) / rotated)
    if cfg.rope_scaling in ("none", "ntk"):
        return unscaled
    if cfg.rope_scaling == "linear":
        return unscaled / cfg.rope_scaling_factor
    if cfg.rope_scaling == "longrope":
        factors = cfg.rope_long_factors if exceeds_original_context(cfg, seq_len) else cfg.rope_short_factors
        return unscaled / torch.tensor(factors, dtype=torch.float64)
    return _yarn(cfg, unscaled) if cfg.rope_scaling == "yarn" else _llama3(cfg, unscaled)


def exceeds_original_context(cfg: ModelConfig, seq_len: int) -> bool:
    """Return whether LongRoPE uses its long factors for sequences of at most `seq_len` tokens (arXiv:2402.13753).

    All sequences of a run or command have the same factors, since cached keys are rotated already.
    """
    return seq_len > cfg.rope_original_seq_len


def attention_factor(cfg: ModelConfig, seq_len: int = 0) -> float:
    """Return the factor of the rotated parts of queries and keys, given `seq_len` as for `rope_frequencies`.

    YaRN's temperature (arXiv:2309.00071 sec. 3.4), or LongRoPE's factor (arXiv:2402.13753 sec. 3.3).
    """
    if cfg.rope_scaling == "longrope":
        given = cfg.rope_long_mscale if exceeds_original_context(cfg, seq_len) else cfg.rope_short_mscale
        return given or math.sqrt(1 + math.log(cfg.rope_scaling_factor) / math.log(cfg.rope_original_seq_len))
    if cfg.rope_scaling != "yarn":
        return 1.0
    if cfg.rope_attention_factor:
        return cfg.rope_attention_factor
    if cfg.rope_mscale and cfg.rope_mscale_all_dim:
        return _temperature(cfg, cfg.rope_mscale) / _temperature(cfg, cfg.rope_mscale_all_dim)
    return _temperature(cfg, 1.0)


def softmax_factor(cfg: ModelConfig) -> float:
    """Return the factor of MLA's scores in addition to 1/sqrt(D): YaRN's temperature squared (DeepSeek-V2)."""
    if cfg.rope_scaling != "yarn" or not cfg.rope_mscale_all_dim:
        return 1.0
    return _temperature(cfg, cfg.rope_mscale_all_dim) ** 2


def _temperature(cfg: ModelConfig, weight: float) -> float:
    return 0.1 * weight * math.log(cfg.rope_scaling_factor) + 1.0


def _yarn(cfg: ModelConfig, plain: Tensor) -> Tensor:
    """Scale frequencies by YaRN: interpolate low ones, keep high ones, blend between (arXiv:2309.00071 sec. 3.2)."""
    pairs = len(plain)

    def pair_with_rotations(times: float) -> float:
        """Return the (fractional) index of the pair that rotates `times` times in the original context."""
        return pairs * math.log(cfg.rope_original_seq_len / (2 * math.pi * times)) / math.log(cfg.rope_theta)

    first = pair_with_rotations(cfg.rope_beta_fast)
    last = pair_with_rotations(cfg.rope_beta_slow)
    if cfg.rope_truncate:
        first = math.floor(first)
        last = math.ceil(last)
    first = max(first, 0)
    last = min(last, 2 * pairs - 1)
    # 0.001 as in transformers: the blend falls within one pair.
    interpolation = ((torch.arange(pairs, dtype=torch.float64) - first) / ((last - first) or 0.001)).clamp(0.0, 1.0)
    return plain * (1 - interpolation + interpolation / cfg.rope_scaling_factor)


def _llama3(cfg: ModelConfig, plain: Tensor) -> Tensor:
    """Scale frequencies as Llama 3.1: interpolate low ones, keep high ones, blend between (arXiv:2407.21783)."""
    rotations = cfg.rope_original_seq_len * plain / (2 * math.pi)
    span = cfg.rope_high_freq_factor - cfg.rope_low_freq_factor
    if span:
        extrapolation = ((rotations - cfg.rope_low_freq_factor) / span).clamp(0.0, 1.0)
    else:
        # Equal factors (Llama 4 Scout): no blend.
        extrapolation = (rotations >= cfg.rope_low_freq_factor).to(plain)
    return plain * (extrapolation + (1 - extrapolation) / cfg.rope_scaling_factor)
