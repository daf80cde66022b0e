"""Log-likelihood of the ends of texts, several at once; and a model that the first rank commands."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from moefold.comm.collectives import broadcast_object
from moefold.inference.generate import Completion, generate
from moefold.inference.load import LoadedModel
from moefold.inference.sampling import SamplingParams


@dataclass(frozen=True)
class Score:
    """What a model makes of the last tokens of a text."""

    log_likelihood: float
    """Sum of their log-probabilities, nats."""
    is_greedy: bool
    """Each of them is the likeliest one in its place."""


@dataclass(frozen=True)
class ScoreRequest:
    """Score the last `num_scored[i]` tokens of each row of ids."""

    sequences: tuple[tuple[int, ...], ...]
    num_scored: tuple[int, ...]


@dataclass(frozen=True)
class GenerateRequest:
    """Continue each row of ids, up to a text that `stops` holds."""

    prompts: tuple[tuple[int, ...], ...]
    max_tokens: int
    sampling: SamplingParams
    eos_ids: frozenset[int]
    stops: tuple[str, ...]


@torch.no_grad()
def score(loaded: LoadedModel, request: ScoreRequest) -> list[Score]:
    """Run the rows through the model together; collective over all ranks, and the same on each. Not with cp or dp.

    Args:
        loaded: the model.
        request: rows of at least two tokens, of which all but the first can be scored.
    """
    model = loaded.model
    device = loaded.groups.device
    tp = loaded.groups.attn.tp.size
    width = -(-(max(map(len, request.sequences)) - 1) // tp) * tp
    tokens = torch.zeros(len(request.sequences), width, dtype=torch.int64)
    labels = torch.zeros_like(tokens)
    is_scored = torch.zeros_like(tokens, dtype=torch.bool)
    for i, (row, count) in enumerate(zip(request.sequences, request.num_scored, strict=True)):
        end = len(row) - 1
        tokens[i, :end] = torch.tensor(row[:-1])
        labels[i, :end] = torch.tensor(row[1:])
        is_scored[i, end - count : end] = True
    model.stage.set_positions(torch.arange(width, device=device))
    logits = model.forward(tokens.to(device))
    found = torch.zeros(2, len(request.sequences), dtype=torch.float64, device=device)
    if logits is not None:
        labels, is_scored = labels.t().to(device), is_scored.t().to(device)
        losses = model.stage.head.vocab_parallel.cross_entropy(logits, labels).double()
        found[0] = -(losses * is_scored).sum(0)
        is_best = model.gather_logits(logits).argmax(-1) == labels
        found[1] = (is_best | ~is_scored).all(0)
    model.wait_send()
    model.stage.set_positions(model.positions)
    sums, are_greedy = model.broadcast_from_last_stage(found).tolist()
    return [Score(total, bool(is_greedy)) for total, is_greedy in zip(sums, are_greedy, strict=True)]


class ServedModel:
    """A model whose first rank gives the orders: the other ranks `serve`, and do their part of each.

    The first rank can so run a program that knows of one process only.
    """

    def __init__(self, loaded: LoadedModel) -> None:
        self.loaded = loaded

    def score(self, sequences: Sequence[Sequence[int]], num_scored: Sequence[int]) -> list[Score]:
        """See `score`; on the first rank."""
        order = ScoreRequest(tuple(map(tuple, sequences)), tuple(num_scored))
        self._broadcast(order)
        return score(self.loaded, order)

    def generate(self, request: GenerateRequest) -> list[Completion]:
        """See `generate`; on the first rank."""
        self._broadcast(request)
        return self._generate(request)

    def shutdown(self) -> None:
        """No more orders: the other ranks return from `serve`."""
        self._broadcast(None)

    def serve(self) -> None:
        """Obey until dismissed; on all ranks but the first."""
        while (order := self._broadcast(None)) is not None:
            if isinstance(order, ScoreRequest):
                score(self.loaded, order)
            else:
                self._generate(order)

    def _broadcast(self, request: ScoreRequest | GenerateRequest | None) -> ScoreRequest | GenerateRequest | None:
        return broadcast_object(request, self.loaded.groups.world, 0)

    def _generate(self, request: GenerateRequest) -> list[Completion]:
        tokenizer = self.loaded.tokenizer
        assert tokenizer is not None or not request.stops

        def is_complete(number: int, tokens: Sequence[int]) -> bool:
            if tokenizer is None or not request.stops:
                return False
            text = tokenizer.decode(tokens)
            return any(stop in text for stop in request.stops)

        return generate(
            self.loaded.model,
            request.prompts,
            request.max_tokens,
            request.sampling,
            eos_ids=request.eos_ids,
            is_complete=is_complete,
        )
