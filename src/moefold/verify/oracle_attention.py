"""Oracle attention: positions, what a query does not see, and RoPE with its scalings.

Written from the papers' formulas; no code is shared with the trainer.
"""

import math

import torch
from torch import Tensor

from moefold.config.model import ModelConfig
from moefold.verify.no_formula import formula_of, unknown_kind


def document_positions(documents: Tensor) -> Tensor:
    """Return the position of each token in its document, int64 [B, S], given the number of its document [B, S]."""
    rows = []
    for sample in documents.tolist():
        positions: list[int] = []
        for i, document in enumerate(sample):
            positions.append(positions[-1] + 1 if i and sample[i - 1] == document else 0)
        rows.append(positions)
    return torch.tensor(rows)


def hidden_keys(model: ModelConfig, layer: int, documents: Tensor, positions: Tensor) -> Tensor:
    """Return the keys that a query of a layer does not see, bool [B, S, S].

    Args:
        model: patterns, window and chunk.
        layer: number of the layer, of softmax attention.
        documents: the document of each token, [B, S].
        positions: of the tokens in their documents, [B, S].
    """
    length = documents.shape[1]
    ones = torch.ones(length, length, dtype=torch.bool)
    masked = ones.triu(1) | (documents[:, :, None] != documents[:, None, :])
    span = model.all_layers[layer].attention.span
    return masked if span is None else masked | formula_of(span)(positions)


def nope_temperature(model: ModelConfig, positions: Tensor) -> Tensor:
    """Return the factor of the queries of layers without RoPE, float64 [B, S], given positions in documents [B, S]."""
    steps = (positions + 1).double() / model.nope_temperature_tokens
    return 1 + model.nope_temperature_scale * torch.log(1 + steps.floor())


def mscale_of_latents(model: ModelConfig) -> float:
    """Return YaRN's factor of the queries and of the keys of MLA that its rotation leaves to the scores."""
    match model.rope_scaling:
        case "yarn" if model.rope_mscale_all_dim > 0:
            return yarn_mscale(model.rope_scaling_factor, model.rope_mscale_all_dim)
        case "yarn" | "none" | "linear" | "llama3" | "ntk" | "longrope":
            return 1.0
        case unknown:
            unknown_kind("model.rope_scaling", unknown)


def apply_rope(
    model: ModelConfig, x: Tensor, rotary_dim: int, positions: Tensor, *, is_interleaved: bool | None = None
) -> Tensor:
    """Apply RoPE to [B, S, heads, D]: rotate each pair of the first `rotary_dim` dims at position p by p * frequency.

    Pair i is dims (2i, 2i + 1) if pairs are interleaved, else (i, i + rotary_dim/2). None: as model.rope_interleaved.

    Args:
        model: frequencies and scaling.
        x: queries or keys.
        rotary_dim: dims that are rotated.
        positions: of the tokens in their documents, [B, S].
        is_interleaved: kind of the pairs.
    """
    half = rotary_dim // 2
    length = x.shape[1]
    frequency = torch.tensor([_inv_freq(model, i, rotary_dim, length) for i in range(half)], dtype=torch.float64)
    angle = positions.double()[..., None] * frequency
    rotation = torch.polar(torch.full_like(angle, _attention_factor(model, length)), angle)[:, :, None, :]
    if model.rope_interleaved if is_interleaved is None else is_interleaved:
        pairs = torch.view_as_complex(x[..., :rotary_dim].reshape(*x.shape[:-1], half, 2))
        rotated = torch.view_as_real(pairs * rotation).flatten(-2)
        return torch.cat((rotated, x[..., rotary_dim:]), -1)
    pairs = torch.complex(x[..., :half], x[..., half:rotary_dim]) * rotation
    return torch.cat((pairs.real, pairs.imag, x[..., rotary_dim:]), -1)


def yarn_mscale(factor: float, mscale: float) -> float:
    """Return YaRN's logarithmic attention scale for a context extension by `factor`."""
    return 1 + mscale * math.log(factor) / 10


def _attention_factor(model: ModelConfig, length: int) -> float:
    factor = model.rope_scaling_factor
    match model.rope_scaling:
        case "none" | "linear" | "llama3" | "ntk":
            return 1.0
        case "longrope":
            of_short_and_long = (model.rope_short_mscale, model.rope_long_mscale)
            original = model.rope_original_seq_len
            return of_short_and_long[length > original] or math.sqrt(1 + math.log(factor, original))
        case "yarn":
            given = model.rope_attention_factor
            numerator = model.rope_mscale
            denominator = model.rope_mscale_all_dim
            if given > 0:
                return given
            return yarn_mscale(factor, numerator or 1.0) / yarn_mscale(factor, denominator if numerator else 0.0)
        case unknown:
            unknown_kind("model.rope_scaling", unknown)


def _inv_freq(model: ModelConfig, i: int, rotary_dim: int, length: int) -> float:
    frequency = 1.0 / model.rope_theta ** (2 * i / rotary_dim)
    stretched = frequency / model.rope_scaling_factor
    match model.rope_scaling:
        case "none":
            return frequency
        case "linear":
            return stretched
        case "ntk":
            return float(frequency * model.rope_scaling_factor ** (-2 * i / (rotary_dim - 2)))
        case "longrope":
            of_short_and_long = (model.rope_short_factors, model.rope_long_factors)
            return frequency / of_short_and_long[length > model.rope_original_seq_len][i]
        case "yarn":
            ramp = _yarn_ramp(model, i, rotary_dim)
            return stretched * ramp + frequency * (1 - ramp)
        case "llama3":
            return _llama3_frequency(model, frequency)
        case unknown:
            unknown_kind("model.rope_scaling", unknown)


def _llama3_frequency(model: ModelConfig, frequency: float) -> float:
    stretched = frequency / model.rope_scaling_factor
    wavelength = 2 * math.pi / frequency
    longest = model.rope_original_seq_len / model.rope_low_freq_factor
    shortest = model.rope_original_seq_len / model.rope_high_freq_factor
    if wavelength < shortest or wavelength == longest == shortest:
        return frequency
    if wavelength > longest:
        return stretched
    smooth = (model.rope_original_seq_len / wavelength - model.rope_low_freq_factor) / (
        model.rope_high_freq_factor - model.rope_low_freq_factor
    )
    return (1 - smooth) * stretched + smooth * frequency


def _yarn_ramp(model: ModelConfig, i: int, rotary_dim: int) -> float:
    """Return YaRN's interpolation ramp: 0 for high-frequency pairs (extrapolated), 1 for low-frequency ones."""

    def dim_of(rotations: float) -> float:
        # original_seq_len * theta**(-2d/rotary_dim) / (2 pi) = rotations, solved for d.
        return rotary_dim / 2 * math.log(model.rope_original_seq_len / (rotations * 2 * math.pi), model.rope_theta)

    low = dim_of(model.rope_beta_fast)
    high = dim_of(model.rope_beta_slow)
    if model.rope_truncate:
        low, high = float(math.floor(low)), float(math.ceil(high))
    low, high = max(0.0, low), min(high, rotary_dim - 1.0)
    if low == high:
        high = low + 0.001
    return min(1.0, max(0.0, (i - low) / (high - low)))
