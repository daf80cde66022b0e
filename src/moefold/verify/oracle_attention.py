"""Oracle attention: positions, masked keys, RoPE with its scalings, and the indexer of sparse attention.

Written from the papers' formulas. No code is shared with the trainer. The indexer (arXiv:2512.02556) scores by the
formula of its part and selects by sorting.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from moefold.config.groups.rope_scaling import RopeFormula
from moefold.config.model import ModelConfig
from moefold.config.sections.train import TrainConfig
from moefold.verify.no_formula import formula_of, unknown_kind
from moefold.verify.oracle_lora import ModuleWeights


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
        is_interleaved: pairing. None means model.rope.interleaved.
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


def is_warmup(model: ModelConfig, train: TrainConfig) -> bool:
    """Return whether only the indexers learn, from attention over all keys."""
    match train.indexer_stage:
        case "warmup":
            return model.attention.selector is not None
        case "sparse":
            return False
        case unknown:
            unknown_kind("train.indexer_stage", unknown)


class OracleIndexer:
    """Selection of the keys of one layer for one micro-batch, and the KL divergence that trains it.

    Args:
        name: of the indexer, whose weights begin with it.
        positions: positions of the tokens in their documents, [B, S]. None means a layer without RoPE.
    """

    def __init__(
        self, model: ModelConfig, train: TrainConfig, weights: Mapping[str, Tensor], name: str, positions: Tensor | None
    ) -> None:
        self._model = model
        self._train = train
        self._weights = weights
        self._name = name
        self._positions = positions

    def score(self, x: Tensor, source: Tensor, masked: Tensor) -> None:
        """Compute the scores, and the mask that selection adds to causality and documents.

        Args:
            x: input of the layer, [B, S, H].
            source: input of the queries of the indexer, [B, S, ...].
            masked: keys that a query does not see, [B, S, S] or [S, S].
        """
        score = formula_of(self._model.attention.indexer)
        self.scores = score(ModuleWeights(self._weights, self._name), x, source, self._rotate)
        self.masked = masked.expand(self.scores.shape).clone()
        # The warm-up selects all keys. top_k is read, so that it counts as read.
        top_k = self._model.attention.indexer.top_k
        if not is_warmup(self._model, self._train):
            self._select(top_k)

    def _select(self, top_k: int) -> None:
        """Mask all keys except the best keys of each query. Of equal scores, the lowest position wins."""
        for sample, queries in enumerate(self.scores.tolist()):
            for t, scores in enumerate(queries):
                visible = [s for s in range(len(scores)) if not self.masked[sample, t, s]]
                best = sorted(visible, key=lambda s: (-scores[s], s))[:top_k]
                self.masked[sample, t] = True
                self.masked[sample, t, best] = False

    def divergence(self, sums: Tensor) -> Tensor:
        """Return the KL divergence of each token, [B, S].

        Args:
            sums: attention probabilities summed over the heads, [B, S, S].
        """
        target = sums / sums.sum(-1, keepdim=True)
        weights = torch.where(self.masked, 0.0, self.scores.exp())
        log_probs = torch.where(self.masked, 0.0, self.scores) - weights.sum(-1, keepdim=True).log()
        log_target = torch.where(target > 0, target, 1.0).log()
        return (target * (log_target - log_probs)).sum(-1)

    def _rotate(self, z: Tensor) -> Tensor:
        """Apply RoPE to the first dims of [B, S, D]."""
        model = self._model
        interleaved = model.attention.indexer.rope_interleaved
        if self._positions is None:
            return z
        rotated = model.rope_settings.rotary_dim
        return apply_rope(model, z[:, :, None], rotated, self._positions, is_interleaved=interleaved)[:, :, 0]
