"""Oracle attention: MLA heads (arXiv:2405.04434 eq. 37 to 47), RoPE with its scalings, and FP8 dispatch rounding.

Written from the papers' formulas and the FP8 format definition; no code is shared with the trainer.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from moefold.config.chosen import chosen_in
from moefold.config.groups.rope_scaling import RopeFormula, RopeScalingPart
from moefold.config.model import ModelConfig
from moefold.verify.no_formula import formula_of, no_formula, unknown_kind


def mla_heads(
    model: ModelConfig, weights: Mapping[str, Tensor], name: str, x: Tensor, positions: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return MLA queries and keys [B, S, A, nope + rope] and values [B, S, A, v] of x [B, S, H].

    Args:
        model: sizes.
        weights: by name.
        name: of the layer's attention.
        x: normalised hidden states.
        positions: of the tokens in their documents, [B, S]; None: a layer without RoPE.
    """
    nope_dim = model.qk_nope_head_dim
    rope_dim = model.qk_rope_head_dim
    rank = model.kv_lora_rank

    def rotate(x: Tensor) -> Tensor:
        return x if positions is None else apply_rope(model, x, rope_dim, positions)

    compressed = latent_queries(model, weights, name, x)
    to_query = weights[f"{name}.wq_up" if model.q_lora_rank else f"{name}.wq"]
    joint = torch.einsum("bsh,rh->bsr", x, weights[f"{name}.wkv_down"])
    latent = _latent_norm(weights[f"{name}.key_value_norm.weight"], joint[..., :rank])
    if model.mla_scale_latents:
        latent = latent * math.sqrt(model.hidden_size / rank)
    shared = rotate(joint[..., None, rank:])[:, :, 0]
    queries = []
    keys = []
    values = []
    for head in range(model.num_attention_heads):
        rows = to_query[head * (nope_dim + rope_dim) : (head + 1) * (nope_dim + rope_dim)]
        query = compressed @ rows.T
        queries.append(torch.cat((query[..., :nope_dim], rotate(query[..., None, nope_dim:])[:, :, 0]), -1))
        width = nope_dim + model.v_head_dim
        rows = weights[f"{name}.wkv_up"][head * width : (head + 1) * width]
        keys.append(torch.cat((latent @ rows[:nope_dim].T, shared), -1))
        values.append(latent @ rows[nope_dim:].T)
    return torch.stack(queries, 2), torch.stack(keys, 2), torch.stack(values, 2)


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


def latent_queries(model: ModelConfig, weights: Mapping[str, Tensor], name: str, x: Tensor) -> Tensor:
    """Return what MLA's query heads are projected from: the normalised query latent, or without one x [B, S, H]."""
    if not model.q_lora_rank:
        return x
    compressed = torch.einsum("bsh,rh->bsr", x, weights[f"{name}.wq_down"])
    compressed = _latent_norm(weights[f"{name}.query_norm.weight"], compressed)
    return compressed * math.sqrt(model.hidden_size / model.q_lora_rank) if model.mla_scale_latents else compressed


def _latent_norm(weight: Tensor, latent: Tensor) -> Tensor:
    # DeepSeek's released code uses epsilon 1e-6 for these norms.
    return weight * latent / torch.sqrt(1e-6 + latent.square().mean(-1, keepdim=True))


def softmax_scale(model: ModelConfig) -> float:
    """Return the softmax scale of the attention scores."""
    scale = model.attention_scale or 1 / math.sqrt(model.head_size)
    match model.attention:
        case "gqa":
            return scale
        case "mla":
            return scale * _rope_formula(model).score_factor
        case unknown:
            no_formula(f"model.attention={unknown!r}")


def _rope_formula(model: ModelConfig) -> RopeFormula:
    found: RopeFormula = formula_of(chosen_in(model, RopeScalingPart))
    return found


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
    formula = _rope_formula(model)
    frequencies = [formula.frequency(i, model.rope_theta, rotary_dim, length) for i in range(half)]
    angle = positions.double()[..., None] * torch.tensor(frequencies, dtype=torch.float64)
    rotation = torch.polar(torch.full_like(angle, formula.rotated_factor(length)), angle)[:, :, None, :]
    if model.rope_interleaved if is_interleaved is None else is_interleaved:
        pairs = torch.view_as_complex(x[..., :rotary_dim].reshape(*x.shape[:-1], half, 2))
        rotated = torch.view_as_real(pairs * rotation).flatten(-2)
        return torch.cat((rotated, x[..., rotary_dim:]), -1)
    pairs = torch.complex(x[..., :half], x[..., half:rotary_dim]) * rotation
    return torch.cat((pairs.real, pairs.imag, x[..., rotary_dim:]), -1)


def has_a_gate_per_head(model: ModelConfig) -> bool:
    """Return whether a gate of softmax attention belongs to a whole head, not to one dim of it."""
    match model.attention_gate_width:
        case "head":
            return True
        case "dim":
            return False
        case unknown:
            unknown_kind("model.attention_gate_width", unknown)
