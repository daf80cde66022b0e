"""Quantiles of the scores of a micro-batch in float64; no code is shared with the trainer."""

import torch
from torch import Tensor

from moefold.config.groups.router import OracleScores


def ranking(scores: OracleScores) -> Tensor:
    """Return the scores less the thresholds, [B, S, E]."""
    return scores.scores - _thresholds(scores)


def bias(batches: list[OracleScores]) -> Tensor:
    """Return the mean of the thresholds over the tokens of a step, with the other sign, [E]."""
    num_tokens = [int(scores.is_token.sum()) for scores in batches]
    thresholds = [count * _thresholds(scores) for count, scores in zip(num_tokens, batches, strict=True)]
    return -(torch.stack(thresholds).sum(0) / sum(num_tokens))


def _thresholds(scores: OracleScores) -> Tensor:
    """Return the (1 - K/E) quantile of each expert's scores, [E]; 0 if the micro-batch has only padding."""
    num_experts = scores.scores.shape[-1]
    if not scores.is_token.any():
        return torch.zeros(num_experts, dtype=torch.float64)
    return torch.quantile(scores.scores[scores.is_token], 1 - scores.top_k / num_experts, dim=0)
