"""Oracle attention: positions, masked keys, and RoPE with its scalings.

Written from the papers' formulas; no code is shared with the trainer.
"""

import torch
from torch import Tensor

from moefold.config.groups.rope_scaling import RopeFormula
from moefold.config.model import ModelConfig
from moefold.verify.no_formula import formula_of


def document_positions(documents: Tensor) -> Tensor:
    """Return the position of each token in its document, int64 [B, S], given its document index [B, S]."""
    rows = []
    for sample in documents.tolist():
        positions: list[int] = []
        for i, document in enumerate(sample):
            positions.append(positions[-1] + 1 if i and sample[i - 1] == document else 0)
        rows.append(positions)
    return torch.tensor(rows)


def hidden_keys(model: ModelConfig, layer: int, documents: Tensor, positions: Tensor) -> Tensor:
    """Return the mask of keys that a query of a layer does not see, bool [B, S, S].

    Args:
        documents: the document of each token, [B, S].
        positions: positions of the tokens in their documents, [B, S].
    """
    length = documents.shape[1]
    is_pair = torch.ones(length, length, dtype=torch.bool)
    masked = is_pair.triu(1) | (documents[:, :, None] != documents[:, None, :])
    span = model.all_layers[layer].attention.span
    return masked if span is None else masked | formula_of(span)(positions)


def apply_rope(
    model: ModelConfig, x: Tensor, rotary_dim: int, positions: Tensor, *, is_interleaved: bool | None = None
) -> Tensor:
    """Apply RoPE to [B, S, heads, D]: rotate each pair of the first `rotary_dim` dims at position p by p * frequency.

    Pair i is dims (2i, 2i + 1) if pairs are interleaved, else (i, i + rotary_dim/2).

    Args:
        model: frequencies and scaling.
        x: queries or keys.
        rotary_dim: dims that are rotated.
        positions: positions of the tokens in their documents, [B, S].
        is_interleaved: pairing; None: model.rope.interleaved.
    """
    half = rotary_dim // 2
    length = x.shape[1]
    formula: RopeFormula = formula_of(model.rope.scaling)
    frequencies = [formula.frequency(i, model.rope.theta, rotary_dim, length) for i in range(half)]
    angle = positions.double()[..., None] * torch.tensor(frequencies, dtype=torch.float64)
    rotation = torch.polar(torch.full_like(angle, formula.rotated_factor(length)), angle)[:, :, None, :]
    if model.rope.interleaved if is_interleaved is None else is_interleaved:
        pairs = torch.view_as_complex(x[..., :rotary_dim].reshape(*x.shape[:-1], half, 2))
        rotated = torch.view_as_real(pairs * rotation).flatten(-2)
        return torch.cat((rotated, x[..., rotary_dim:]), -1)
    pairs = torch.complex(x[..., :half], x[..., half:rotary_dim]) * rotation
    return torch.cat((pairs.real, pairs.imag, x[..., rotary_dim:]), -1)
