"""Autoregressive generation for a batch of prompts, under tp, pp, ep and etp; next-token sampling from logits."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from moefold.inference.sampling import SamplingParams
from moefold.model.init import seed_for
from moefold.parallel.inference_model import InferenceModel, KVCacheDecoder


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


TokenCallback = Callable[[int, int], None]
"""Callback for each new token: (prompt index, token)."""
StopCondition = Callable[[int, Sequence[int]], bool]
"""Predicate for a complete sample: (prompt index, its new tokens). Must return the same on every rank."""


@dataclass
class Completion:
    """Generated continuation of one prompt."""

    tokens: list[int] = field(default_factory=list)
    """New tokens, without the end-of-text token."""
    finish_reason: Literal["length", "eos", "stop"] = "length"
    """Reason for the end: --max-tokens, an end-of-text token, or the caller's stop condition."""


def generate(
    model: InferenceModel,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    sampling: SamplingParams,
    *,
    eos_ids: frozenset[int] = frozenset(),
    on_token: TokenCallback = lambda number, token: None,
    is_complete: StopCondition = lambda number, tokens: False,
) -> list[Completion]:
    """Generate a continuation of every prompt. Collective over all ranks; the result is equal on each.

    The prefill runs all prompts as one right-padded batch; then the batch decodes token by token, with a KV cache,
    until all samples are complete. The last stage samples, and the tokens are broadcast to the other ranks.

    Args:
        model: a model without cp and dp.
        prompts: token ids of each prompt, at least one.
        max_tokens: maximum number of new tokens of each prompt.
        sampling: sampling parameters.
        eos_ids: end-of-text tokens.
        on_token: called for each new token, on every rank.
        is_complete: stop condition, called after each new token.
    """
    lengths_B = torch.tensor([len(prompt) for prompt in prompts])
    assert int(lengths_B.min()) > 0, "a prompt has at least one token"
    longest = int(lengths_B.max())
    tokens = torch.zeros(len(prompts), longest, dtype=torch.int64)
    for i, prompt in enumerate(prompts):
        tokens[i, : len(prompt)] = torch.as_tensor(prompt)
    completions = [Completion() for _ in prompts]
    is_open = [True] * len(prompts)
    sampler = TokenSampler(sampling, len(prompts))
    first_B = torch.zeros_like(lengths_B)
    picked_B = lengths_B - 1
    num_keys = longest
    with KVCacheDecoder(model, longest + max_tokens) as decoder:
        for step in range(max_tokens):
            logits = decoder.forward(tokens, first_B, picked_B, num_keys)
            chosen = sampler.choose(logits) if model.stage.is_last else torch.zeros_like(lengths_B)
            chosen = model.broadcast_from_last_stage(chosen.to(model.groups.device)).cpu()
            for i, token in enumerate(chosen.tolist()):
                if is_open[i]:
                    is_open[i] = _append_token(completions[i], i, token, (eos_ids, on_token, is_complete))
            if not any(is_open):
                break
            # Complete samples are decoded further and discarded: a fixed batch shape is simpler.
            tokens = chosen.unsqueeze(1)
            picked_B = torch.zeros_like(lengths_B)
            first_B = lengths_B + step
            num_keys = longest + step + 1
    return completions


def _append_token(
    completion: Completion, number: int, token: int, stop_rules: tuple[frozenset[int], TokenCallback, StopCondition]
) -> bool:
    """Append a token to a sample; return whether the sample continues."""
    eos_ids, on_token, is_complete = stop_rules
    if token in eos_ids:
        completion.finish_reason = "eos"
        return False
    completion.tokens.append(token)
    on_token(number, token)
    if is_complete(number, completion.tokens):
        completion.finish_reason = "stop"
        return False
    return True
