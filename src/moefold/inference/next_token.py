"""The next token from logits: greedy, or drawn with a temperature from the likeliest ones."""

import torch
from torch import Tensor

from moefold.inference.sampling import SamplingParams
from moefold.model.init import seed_for


class TokenSampler:
    """Chooses tokens for several samples, each with random numbers of its own: neighbours do not change a sample.

    Args:
        params: checked.
        num_samples: samples of the batch.
    """

    def __init__(self, params: SamplingParams, num_samples: int) -> None:
        self._params = params
        self._generators = [
            torch.Generator().manual_seed(seed_for(params.seed, f"sample {i}")) for i in range(num_samples)
        ]

    def choose(self, logits_BV: Tensor) -> Tensor:
        """One token for each sample, int64 [B] on the CPU."""
        if self._params.temperature == 0:
            return logits_BV.argmax(-1).cpu()
        # Float64, so that a place on the line from 0 to 1 falls on the same token on every device.
        probs_BV = (logits_BV.cpu().double() / self._params.temperature).softmax(-1)
        draws_B = torch.stack([torch.rand((), generator=g, dtype=torch.float64) for g in self._generators])
        return draw(apply_top_k_top_p(probs_BV, self._params.top_k, self._params.top_p), draws_B)


def apply_top_k_top_p(probs_BV: Tensor, top_k: int, top_p: float) -> Tensor:
    """Set the probability of all but the likeliest tokens to 0; the rest is not scaled up. At least one token stays."""
    sorted_BV, order_BV = probs_BV.sort(stable=True, dim=-1, descending=True)
    if 0 < top_k < probs_BV.shape[-1]:
        sorted_BV[..., top_k:] = 0
    if top_p < 1:
        total = sorted_BV.sum(-1, keepdim=True)
        before_BV = sorted_BV.cumsum(-1) - sorted_BV
        sorted_BV.masked_fill_(before_BV >= top_p * total, 0)
    return torch.zeros_like(probs_BV).scatter_(-1, order_BV, sorted_BV)


def draw(probs_BV: Tensor, draws_B: Tensor) -> Tensor:
    """The token in which a place in [0, 1) falls when the probabilities, in the order of ids, fill that line.

    Args:
        probs_BV: of any positive sum.
        draws_B: places.

    Returns:
        int64 [B]; never a token of probability 0.
    """
    line_BV = probs_BV.cumsum(-1)
    places_B1 = (draws_B * line_BV[:, -1]).unsqueeze(-1)
    tokens_B = torch.searchsorted(line_BV, places_B1, right=True).squeeze(-1)
    last_B = (probs_BV.shape[-1] - 1) - (probs_BV.flip(-1) > 0).int().argmax(-1)
    return tokens_B.minimum(last_B)
