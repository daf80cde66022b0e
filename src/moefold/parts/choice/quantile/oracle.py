"""Quantiles of the scores of a micro-batch in float64; no code is shared with the trainer."""

import torch
from torch import Tensor

from moefold.config.groups.router import OracleScores


def ranking(given: OracleScores) -> Tensor:
    """Return the scores less the thresholds, [B, S, E]."""
    return given.scores - _thresholds(given)


def bias(batches: list[OracleScores]) -> Tensor:
    """Return the mean of the thresholds over the tokens of a step, with the other sign, [E]."""
    num_tokens = [int(given.is_token.sum()) for given in batches]
    thresholds = [count * _thresholds(given) for count, given in zip(num_tokens, batches, strict=True)]
    return -(torch.stack(thresholds).sum(0) / sum(num_tokens))


def _thresholds(given: OracleScores) -> Tensor:
    """Return the (1 - K/E) quantile of each expert's scores, [E]; 0 if the micro-batch has only padding."""
    num_experts = given.scores.shape[-1]
    if not given.is_token.any():
        return torch.zeros(num_experts, dtype=torch.float64)
    return torch.quantile(given.scores[given.is_token], 1 - given.top_k / num_experts, dim=0)
