"""Sampling of the next token with counter-based random numbers, so that a draw only depends on its sample."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from moefold.comm.host_copy import copy_to_device
from moefold.cost.rollout_memory import MAX_WEIGHTS
from moefold.errors import RunError
from moefold.inference.engine.requests import Request
from moefold.inference.sampling import SamplingParams
from moefold.integer_hash import draw_bits, hash_ints
from moefold.ops.cpu.draw import NO_TOKEN, CDraw, weight_unit

MANTISSA_BITS = 53


class UniformStream:
    """Uniform draws in [0, 1) of one sample, a pure function of (seed, prompt number, sample number, position)."""

    def __init__(self, seed: int, request: Request) -> None:
        self._key = hash_ints(seed, request.prompt_number, request.sample_number)
        self._max_tokens = request.max_tokens
        self._draws: list[float] = []

    def __getitem__(self, position: int) -> float:
        """Return the draw of the new token at an index, 0 for the first token, as a multiple of 2**-53."""
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
    """Uniform draw in [0, 1). It is not read at temperature 0."""


def choose_tokens(logits_NV: Tensor, draws: Sequence[Draw], kernel: CDraw | None = None) -> Tensor:
    """Sample a token for each row of logits over the whole vocabulary: int64 [N] on their device, without a wait.

    A row's token does not depend on the other rows. Weights are computed in float64 and rounded to integers. Their sums
    are exact, so that the order of summation does not change a draw. Devices may differ in the last bit of `exp`, and
    then round a weight differently. The bounds of tokens then move by a few units of at least 2^44. About one draw in
    10^12 falls between an old and a new bound.

    Args:
        kernel: draws if it supports the logits and the whole distribution is sampled. None means torch operations.

    Returns:
        Token ids, or `NO_TOKEN` for a row with NaN or infinity, which has no distribution to sample from.
    """
    first = draws[0].params
    if all(draw.params is first for draw in draws):
        return _choose(logits_NV, draws, kernel)
    rows_of: dict[SamplingParams, list[int]] = {}
    for row, draw in enumerate(draws):
        rows_of.setdefault(draw.params, []).append(row)
    device = logits_NV.device
    tokens_N = torch.empty(len(draws), dtype=torch.int64, device=device)
    for rows in rows_of.values():
        rows_M = copy_to_device(torch.tensor(rows), device)
        tokens_N[rows_M] = _choose(logits_NV[rows_M], [draws[row] for row in rows], kernel)
    return tokens_N


def check_drawn(tokens: Sequence[float]) -> None:
    """Check that every row had a distribution. Raise RunError if there is a `NO_TOKEN` among the tokens."""
    if NO_TOKEN in tokens:
        raise RunError(
            "the model's logits are NaN or infinite, so no token can be sampled: its weights have diverged; use an "
            "earlier checkpoint, or train with a lower rate"
        )


def _choose(logits_NV: Tensor, draws: Sequence[Draw], kernel: CDraw | None) -> Tensor:
    """Sample with the parameters of the first draw, which all rows share, in parts of bounded memory."""
    params = draws[0].params
    if kernel is not None and params.takes_all_tokens and kernel.supports(logits_NV):
        return kernel(logits_NV, params.temperature, [draw.uniform for draw in draws])
    size = max(1, MAX_WEIGHTS // logits_NV.shape[-1])
    starts = range(0, len(draws), size)
    return torch.cat([_choose_part(logits_NV[i : i + size], draws[i : i + size]) for i in starts])


def _choose_part(logits_NV: Tensor, draws: Sequence[Draw]) -> Tensor:
    params = draws[0].params
    # NaN and infinity appear in the maximum of their row.
    has_tokens_N = logits_NV.amax(-1).isfinite()
    if params.temperature == 0:
        return logits_NV.argmax(-1).where(has_tokens_N, NO_TOKEN)
    weights_NV = _weights(logits_NV, params.temperature, params.min_p)
    weights_NV = apply_top_k_top_p(weights_NV, params.top_k, params.top_p)
    uniforms_N = copy_to_device(torch.tensor([draw.uniform for draw in draws], dtype=torch.float64), logits_NV.device)
    return sample_inverse_cdf(weights_NV, uniforms_N).where(has_tokens_N, NO_TOKEN)


def _weights(logits_NV: Tensor, temperature: float, min_p: float) -> Tensor:
    """Return weights proportional to the probabilities, int64. Weights below `min_p` times the largest are 0."""
    scaled_NV = logits_NV.double()
    if temperature != 1:
        scaled_NV = scaled_NV / temperature
    powers_NV = (scaled_NV - scaled_NV.amax(-1, keepdim=True)).exp_()
    unit = weight_unit(logits_NV.shape[-1])
    weights_NV = powers_NV.mul_(unit).round_().long()
    if min_p > 0:
        weights_NV.masked_fill_(weights_NV < math.ceil(min_p * unit), 0)
    return weights_NV


def apply_top_k_top_p(weights_NV: Tensor, top_k: int, top_p: float) -> Tensor:
    """Apply top-k, then top-p filtering: set the other integer weights to 0, and keep at least one."""
    if not 0 < top_k < weights_NV.shape[-1] and top_p >= 1:
        return weights_NV
    sorted_NV, order_NV = weights_NV.sort(stable=True, dim=-1, descending=True)
    if 0 < top_k < weights_NV.shape[-1]:
        sorted_NV[..., top_k:] = 0
    if top_p < 1:
        ends_NV = sorted_NV.cumsum(-1)
        limits_N1 = (ends_NV[..., -1:].double() * top_p).ceil_().long()
        sorted_NV.masked_fill_(ends_NV - sorted_NV >= limits_N1, 0)
    return torch.zeros_like(weights_NV).scatter_(-1, order_NV, sorted_NV)


def sample_inverse_cdf(weights_NV: Tensor, uniforms_N: Tensor) -> Tensor:
    """Sample tokens by inverse transform: map draws in [0, 1) through the cumulative distribution over ids.

    Args:
        weights_NV: int64, with a positive sum below 2^63.
        uniforms_N: uniform draws in [0, 1), float64.

    Returns:
        Token ids, int64 [N], never a token of weight 0.
    """
    cumulative_NV = weights_NV.cumsum(-1)
    totals_N = cumulative_NV[:, -1]
    # The product is rounded, possibly up to the sum.
    thresholds_N = (uniforms_N * totals_N.double()).long().minimum(totals_N - 1)
    return torch.searchsorted(cumulative_NV, thresholds_N.unsqueeze(-1), right=True).squeeze(-1)
