"""Changes of the logits before a token is drawn: biases, penalties, a least length and grammars."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moefold.inference.engine.requests import LogitRules, Request


class Constraint(Protocol):
    """State of a grammar after the tokens of one sample."""

    def allowed(self) -> NDArray[np.bool_]:
        """Return which tokens may come next, [V]; at least one may."""
        ...

    def push(self, token: int) -> None:
        """Add a token that was allowed."""
        ...


Constrain = Callable[[Request], Constraint]
"""Starts the grammar of a request."""


def change_logits(
    logits_V: Tensor, request: Request, rules: LogitRules, tokens: Sequence[int], constraint: Constraint | None
) -> None:
    """Change the logits of a sample's next token in place.

    Args:
        logits_V: over the whole vocabulary.
        request: the sample.
        rules: of the request.
        tokens: its new tokens so far.
        constraint: state of the grammar, if there is one.
    """
    device = logits_V.device
    if rules.bias:
        ids, values = zip(*rules.bias, strict=True)
        logits_V[list(ids)] += torch.tensor(values, dtype=logits_V.dtype, device=device)
    if rules.repetition_penalty != 1:
        seen = sorted({*request.prompt, *tokens})
        found = logits_V[seen]
        logits_V[seen] = torch.where(found > 0, found / rules.repetition_penalty, found * rules.repetition_penalty)
    counts = Counter(tokens)
    if counts and (rules.frequency_penalty or rules.presence_penalty):
        penalties = [count * rules.frequency_penalty + rules.presence_penalty for count in counts.values()]
        logits_V[list(counts)] -= torch.tensor(penalties, dtype=logits_V.dtype, device=device)
    if len(tokens) < rules.min_tokens and len(request.eos_ids) < len(logits_V):
        logits_V[sorted(request.eos_ids)] = -torch.inf
    if constraint is not None:
        logits_V.masked_fill_(~torch.from_numpy(constraint.allowed()).to(device), -torch.inf)
