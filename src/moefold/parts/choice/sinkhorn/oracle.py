"""Sinkhorn iterations of the oracle, in float64; no code is shared with the trainer."""

import torch
from torch import Tensor

from moefold.config.groups.router import OracleScores


def ranking(iterations: int, scores: OracleScores) -> Tensor:
    """Return the scaled matrix of a micro-batch, [B, S, E], 0 for padding."""
    values = torch.zeros_like(scores.logits)
    values[scores.is_token] = _sinkhorn(scores.logits[scores.is_token], iterations)
    return values


def _sinkhorn(logits: Tensor, iterations: int) -> Tensor:
    """Return exp(logits) with its columns scaled by Sinkhorn iterations over rows and columns."""
    matrix = torch.exp(logits)
    columns = torch.ones(logits.shape[1], dtype=torch.float64)
    for _ in range(iterations):
        rows = 1 / (matrix @ columns)
        columns = 1 / (matrix.T @ rows)
    return matrix * columns
