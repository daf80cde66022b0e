"""Next-token sampling from logits: greedy, or with temperature, top-k and top-p."""

import torch
from torch import Tensor

from moefold.inference.sampling import SamplingParams
from moefold.model.init import seed_for


class TokenSampler:
    """Samples the next tokens of a batch, with one generator per sample, so that the batch does not affect a sample.

    Args:
        params: checked sampling parameters.
        num_samples: batch size, B.
    """

    def __init__(self, params: SamplingParams, num_samples: int) -> None:
        self._params = params
        self._generators = [
            torch.Generator().manual_seed(seed_for(params.seed, f"sample {i}")) for i in range(num_samples)
        ]

    def choose(self, logits_BV: Tensor) -> Tensor:
        """Sample one token for each sequence, int64 [B] on the CPU."""
        if self._params.temperature == 0:
            return logits_BV.argmax(-1).cpu()
        # Float64 on the CPU, so that a draw selects the same token on every device.
        probs_BV = (logits_BV.cpu().double() / self._params.temperature).softmax(-1)
        draws_B = torch.stack([torch.rand((), generator=g, dtype=torch.float64) for g in self._generators])
        return sample_inverse_cdf(apply_top_k_top_p(probs_BV, self._params.top_k, self._params.top_p), draws_B)


def apply_top_k_top_p(probs_BV: Tensor, top_k: int, top_p: float) -> Tensor:
    """Apply top-k, then top-p filtering: set the other probabilities to 0 without renormalising. Keeps at least one."""
    sorted_BV, order_BV = probs_BV.sort(stable=True, dim=-1, descending=True)
    if 0 < top_k < probs_BV.shape[-1]:
        sorted_BV[..., top_k:] = 0
    if top_p < 1:
        total = sorted_BV.sum(-1, keepdim=True)
        before_BV = sorted_BV.cumsum(-1) - sorted_BV
        sorted_BV.masked_fill_(before_BV >= top_p * total, 0)
    return torch.zeros_like(probs_BV).scatter_(-1, order_BV, sorted_BV)


def sample_inverse_cdf(probs_BV: Tensor, draws_B: Tensor) -> Tensor:
    """Sample tokens by inverse transform: map draws in [0, 1) through the cumulative distribution over ids.

    Args:
        probs_BV: probabilities of any positive sum.
        draws_B: uniform draws in [0, 1).

    Returns:
        Token ids, int64 [B]; never a token of probability 0.
    """
    cumulative_BV = probs_BV.cumsum(-1)
    thresholds_B1 = (draws_B * cumulative_BV[:, -1]).unsqueeze(-1)
    tokens_B = torch.searchsorted(cumulative_BV, thresholds_B1, right=True).squeeze(-1)
    last_B = (probs_BV.shape[-1] - 1) - (probs_BV.flip(-1) > 0).int().argmax(-1)
    return tokens_B.minimum(last_B)
