"""Indexer of the oracle (arXiv:2512.02556): scores by the formula of its part, selection by sorting, its loss."""

from collections.abc import Mapping

import torch
from torch import Tensor

from moefold.config.model import ModelConfig
from moefold.config.train import TrainConfig
from moefold.verify.no_formula import formula_of, unknown_kind
from moefold.verify.oracle_attention import apply_rope
from moefold.verify.oracle_lora import ModuleWeights


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
        model: section with the sizes.
        train: section with the stage.
        weights: weights by name.
        name: name of the indexer.
        positions: positions of the tokens in their documents, [B, S]; None: a layer without RoPE.
    """

    def __init__(
        self,
        model: ModelConfig,
        train: TrainConfig,
        weights: Mapping[str, Tensor],
        name: str,
        positions: Tensor | None,
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
        # The warm-up selects all keys; top_k is read, so that it counts as read.
        top_k = self._model.attention.indexer.top_k
        if not is_warmup(self._model, self._train):
            self._select(top_k)

    def _select(self, top_k: int) -> None:
        """Mask all keys except the best keys of each query; of equal scores, the lowest position wins."""
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
