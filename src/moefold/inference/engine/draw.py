"""Sampling of the next token with counter-based random numbers, so that a draw depends on its sample alone."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from moefold.data.index_shuffle import draw_bits, hash_ints
from moefold.errors import RunError
from moefold.inference.engine.requests import Request
from moefold.inference.sampling import SamplingParams

MANTISSA_BITS = 53


class UniformStream:
    """Uniform draws in [0, 1) of one sample, a pure function of (seed, prompt number, sample number, position).

    Args:
        seed: of the sampling parameters.
        request: the sample.
    """

    def __init__(self, seed: int, request: Request) -> None:
        self._key = hash_ints(seed, request.prompt_number, request.sample_number)
        self._max_tokens = request.max_tokens
        self._draws: list[float] = []

    def __getitem__(self, position: int) -> float:
        """Return the draw of the new token at an index, 0 for the first one; a multiple of 2**-53."""
        if position >= len(self._draws):
            # Word i of a stream does not depend on how many words are drawn: the stream grows by doubling.
            count = min(max(64, 2 * (position + 1)), max(self._max_tokens, position + 1))
            words = draw_bits(self._key, count) >> (64 - MANTISSA_BITS)
            self._draws = (words * 2.0**-MANTISSA_BITS).tolist()
        return self._draws[position]


class Draw(NamedTuple):
    """One draw of a pass."""

    params: SamplingParams
    uniform: float
    """In [0, 1); not read at temperature 0."""


def choose_tokens(logits_NV: Tensor, draws: Sequence[Draw]) -> Tensor:
    """Sample one token for each row of logits, int64 [N] on the CPU.

    A row's token does not depend on the other rows. Computation is in float64 on the CPU, so that a draw selects the
    same token on every device.

    Args:
        logits_NV: logits over the whole vocabulary.
        draws: of each row.

    Raises:
        RunError: logits are NaN or infinite, so there is no distribution to sample from.
    """
    # NaN and infinity reach the maximum of their row.
    if not logits_NV.amax(-1).isfinite().all():
        raise RunError(
            "the model's logits are NaN or infinite, so no token can be sampled: its weights have diverged; use an "
            "earlier checkpoint, or train with a lower rate"
        )
    first = draws[0].params
    if all(draw.params is first for draw in draws):
        return _choose(logits_NV, draws)
    rows_of: dict[SamplingParams, list[int]] = {}
    for row, draw in enumerate(draws):
        rows_of.setdefault(draw.params, []).append(row)
    tokens_N = torch.empty(len(draws), dtype=torch.int64)
    for rows in rows_of.values():
        tokens_N[rows] = _choose(logits_NV[rows], [draws[row] for row in rows])
    return tokens_N


def _choose(logits_NV: Tensor, draws: Sequence[Draw]) -> Tensor:
    """Sample with the parameters of the first draw, which all rows share."""
    params = draws[0].params
    if params.temperature == 0:
        return logits_NV.argmax(-1).cpu()
    probs_NV = (logits_NV.cpu().double() / params.temperature).softmax(-1)
    probs_NV = apply_top_k_top_p(apply_min_p(probs_NV, params.min_p), params.top_k, params.top_p)
    return sample_inverse_cdf(probs_NV, torch.tensor([draw.uniform for draw in draws], dtype=torch.float64))


def apply_min_p(probs_NV: Tensor, min_p: float) -> Tensor:
    """Set probabilities below `min_p` times the largest of their row to 0, without renormalising."""
    if min_p <= 0:
        return probs_NV
    return probs_NV.masked_fill(probs_NV < min_p * probs_NV.amax(-1, keepdim=True), 0)


def apply_top_k_top_p(probs_NV: Tensor, top_k: int, top_p: float) -> Tensor:
    """Apply top-k, then top-p filtering: set the other probabilities to 0 without renormalising. Keeps at least one."""
    if not 0 < top_k < probs_NV.shape[-1] and top_p >= 1:
        return probs_NV
    sorted_NV, order_NV = probs_NV.sort(stable=True, dim=-1, descending=True)
    if 0 < top_k < probs_NV.shape[-1]:
        sorted_NV[..., top_k:] = 0
    if top_p < 1:
        total = sorted_NV.sum(-1, keepdim=True)
        before_NV = sorted_NV.cumsum(-1) - sorted_NV
        sorted_NV.masked_fill_(before_NV >= top_p * total, 0)
    return torch.zeros_like(probs_NV).scatter_(-1, order_NV, sorted_NV)


def sample_inverse_cdf(probs_NV: Tensor, draws_N: Tensor) -> Tensor:
    """Sample tokens by inverse transform: map draws in [0, 1) through the cumulative distribution over ids.

    Args:
        probs_NV: probabilities of any positive sum.
        draws_N: uniform draws in [0, 1).

    Returns:
        Token ids, int64 [N]; never a token of probability 0.
    """
    cumulative_NV = probs_NV.cumsum(-1)
    thresholds_N1 = (draws_N * cumulative_NV[:, -1]).unsqueeze(-1)
    tokens_N = torch.searchsorted(cumulative_NV, thresholds_N1, right=True).squeeze(-1)
    last_N = (probs_NV.shape[-1] - 1) - (probs_NV.flip(-1) > 0).int().argmax(-1)
    return tokens_N.minimum(last_N)
