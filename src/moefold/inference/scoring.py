"""Log-likelihood of the ends of texts, several at once; and a model that the first rank commands."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from moefold.inference.generate import Continuation, generate
from moefold.inference.opening import OpenModel
from moefold.inference.sampling import Sampling
from moefold.parallel.collectives import broadcast_object


@dataclass(frozen=True)
class Score:
    """What a model makes of the last tokens of a text."""

    log_likelihood: float
    """Sum of their log-probabilities, nats."""
    is_greedy: bool
    """Each of them is the likeliest one in its place."""


@dataclass(frozen=True)
class ScoreOrder:
    """Score the last `num_scored[i]` tokens of each row of ids."""

    rows: tuple[tuple[int, ...], ...]
    num_scored: tuple[int, ...]


@dataclass(frozen=True)
class GenerateOrder:
    """Continue each row of ids, up to a text that `stops` holds."""

    rows: tuple[tuple[int, ...], ...]
    max_tokens: int
    sampling: Sampling
    eos_ids: frozenset[int]
    stops: tuple[str, ...]


@torch.no_grad()
def score(opened: OpenModel, order: ScoreOrder) -> list[Score]:
    """Run the rows through the model together; collective over all ranks, and the same on each. Not with cp or dp.

    Args:
        opened: the model.
        order: rows of at least two tokens, of which all but the first can be scored.
    """
    model, device = opened.model, opened.groups.device
    tp = opened.groups.attn.tp.size
    width = -(-(max(map(len, order.rows)) - 1) // tp) * tp
    tokens = torch.zeros(len(order.rows), width, dtype=torch.int64)
    labels, is_scored = torch.zeros_like(tokens), torch.zeros_like(tokens, dtype=torch.bool)
    for i, (row, count) in enumerate(zip(order.rows, order.num_scored, strict=True)):
        end = len(row) - 1
        tokens[i, :end], labels[i, :end] = torch.tensor(row[:-1]), torch.tensor(row[1:])
        is_scored[i, end - count : end] = True
    model.stage.place(torch.arange(width, device=device))
    logits = model.forward(tokens.to(device))
    found = torch.zeros(2, len(order.rows), dtype=torch.float64, device=device)
    if logits is not None:
        labels, is_scored = labels.t().to(device), is_scored.t().to(device)
        losses = model.stage.head.vocabulary.cross_entropy(logits, labels).double()
        found[0] = -(losses * is_scored).sum(0)
        is_best = model.whole_logits(logits).argmax(-1) == labels
        found[1] = (is_best | ~is_scored).all(0)
    model.finish()
    model.stage.place(model.positions)
    sums, are_greedy = model.from_last_stage(found).tolist()
    return [Score(total, bool(is_greedy)) for total, is_greedy in zip(sums, are_greedy, strict=True)]


class CommandedModel:
    """A model whose first rank gives the orders: the other ranks `follow`, and do their part of each.

    The first rank can so run a program that knows of one process only.
    """

    def __init__(self, opened: OpenModel) -> None:
        self.opened = opened

    def score(self, rows: Sequence[Sequence[int]], num_scored: Sequence[int]) -> list[Score]:
        """See `score`; on the first rank."""
        order = ScoreOrder(tuple(map(tuple, rows)), tuple(num_scored))
        self._give(order)
        return score(self.opened, order)

    def generate(self, order: GenerateOrder) -> list[Continuation]:
        """See `generate`; on the first rank."""
        self._give(order)
        return self._generate(order)

    def dismiss(self) -> None:
        """No more orders: the other ranks return from `follow`."""
        self._give(None)

    def follow(self) -> None:
        """Obey until dismissed; on all ranks but the first."""
        while (order := self._give(None)) is not None:
            if isinstance(order, ScoreOrder):
                score(self.opened, order)
            else:
                self._generate(order)

    def _give(self, order: ScoreOrder | GenerateOrder | None) -> ScoreOrder | GenerateOrder | None:
        return broadcast_object(order, self.opened.groups.world, 0)

    def _generate(self, order: GenerateOrder) -> list[Continuation]:
        tokenizer = self.opened.tokenizer
        assert tokenizer is not None or not order.stops

        def is_complete(number: int, tokens: Sequence[int]) -> bool:
            if tokenizer is None or not order.stops:
                return False
            text = tokenizer.decode(tokens)
            return any(stop in text for stop in order.stops)

        return generate(
            self.opened.model,
            order.rows,
            order.max_tokens,
            order.sampling,
            eos_ids=order.eos_ids,
            is_complete=is_complete,
        )
