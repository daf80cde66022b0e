"""Text continued token by token, several prompts at once, under tp, pp, ep and etp."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

from moefold.inference.next_token import TokenSampler
from moefold.inference.sampling import SamplingParams
from moefold.parallel.inference_model import InferenceModel, KVCacheDecoder

TokenCallback = Callable[[int, int], None]
"""Is told of each new token: (number of the prompt, token)."""
StopCondition = Callable[[int, Sequence[int]], bool]
"""Whether a sample is complete: (number of the prompt, its new tokens). Says the same on every rank."""


@dataclass
class Completion:
    """What was generated for one prompt."""

    tokens: list[int] = field(default_factory=list)
    """New tokens; the one that ended the text is not among them."""
    finish_reason: Literal["length", "eos", "stop"] = "length"
    """Why it ended: --max-tokens, an end-of-text token, or what the caller waited for."""


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
    """Continue every prompt; collective over all ranks, and the same on each.

    The prompts go through the model together, shorter ones filled up behind; then all samples take one step after
    another until the last is complete. One rank draws, the others learn from it.

    Args:
        model: without cp and dp.
        prompts: ids of each prompt, at least one.
        max_tokens: most new tokens of each.
        sampling: how they are chosen.
        eos_ids: tokens that end a text.
        on_token: told of each new token, on every rank.
        is_complete: asked after each new token.
    """
    lengths_B = torch.tensor([len(prompt) for prompt in prompts])
    assert int(lengths_B.min()) > 0, "a prompt has at least one token"
    longest = int(lengths_B.max())
    tokens = torch.zeros(len(prompts), longest, dtype=torch.int64)
    for i, prompt in enumerate(prompts):
        tokens[i, : len(prompt)] = torch.as_tensor(prompt)
    found = [Completion() for _ in prompts]
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
                    is_open[i] = _append_token(found[i], i, token, (eos_ids, on_token, is_complete))
            if not any(is_open):
                break
            # Complete samples go on unseen: a batch of one shape is simpler than one that shrinks.
            tokens = chosen.unsqueeze(1)
            picked_B = torch.zeros_like(lengths_B)
            first_B = lengths_B + step
            num_keys = longest + step + 1
    return found


def _append_token(
    found: Completion, number: int, token: int, options: tuple[frozenset[int], TokenCallback, StopCondition]
) -> bool:
    """Add a token to a sample; returns whether it goes on."""
    eos_ids, watch, is_complete = options
    if token in eos_ids:
        found.finish_reason = "eos"
        return False
    found.tokens.append(token)
    watch(number, token)
    if is_complete(number, found.tokens):
        found.finish_reason = "stop"
        return False
    return True
