"""Log-likelihood scoring of token sequences, and a model that rank 0 serves to a single-process program."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from moefold.comm.collectives import broadcast_object
from moefold.inference.generate import Completion, generate
from moefold.inference.load import LoadedModel
from moefold.inference.sampling import SamplingParams


@dataclass(frozen=True)
class Score:
    """Score of the last tokens of a sequence."""

    log_likelihood: float
    """Sum of the tokens' log-probabilities, in nats."""
    is_greedy: bool
    """Whether each token is the argmax at its position."""


@dataclass(frozen=True)
class ScoreRequest:
    """Request to score the last `num_scored[i]` tokens of each sequence."""

    sequences: tuple[tuple[int, ...], ...]
    num_scored: tuple[int, ...]


@dataclass(frozen=True)
class GenerateRequest:
    """Request to generate a continuation of each prompt, up to one of the strings in `stops`."""

    prompts: tuple[tuple[int, ...], ...]
    max_tokens: int
    sampling: SamplingParams
    eos_ids: frozenset[int]
    stops: tuple[str, ...]


@torch.no_grad()
def score(loaded: LoadedModel, request: ScoreRequest) -> list[Score]:
    """Score sequences in one batch. Collective over all ranks; the result is equal on each. Not for cp or dp > 1.

    Args:
        loaded: the model.
        request: sequences of at least two tokens, of which all but the first can be scored.
    """
    model = loaded.model
    device = loaded.groups.device
    tp = loaded.groups.attn.tp.size
    width = -(-(max(map(len, request.sequences)) - 1) // tp) * tp
    tokens = torch.zeros(len(request.sequences), width, dtype=torch.int64)
    labels = torch.zeros_like(tokens)
    is_scored = torch.zeros_like(tokens, dtype=torch.bool)
    for i, (sequence, count) in enumerate(zip(request.sequences, request.num_scored, strict=True)):
        end = len(sequence) - 1
        tokens[i, :end] = torch.tensor(sequence[:-1])
        labels[i, :end] = torch.tensor(sequence[1:])
        is_scored[i, end - count : end] = True
    model.stage.set_positions(torch.arange(width, device=device))
    logits = model.forward(tokens.to(device))
    scores = torch.zeros(2, len(request.sequences), dtype=torch.float64, device=device)
    if logits is not None:
        labels, is_scored = labels.t().to(device), is_scored.t().to(device)
        losses = model.stage.head.vocab_parallel.cross_entropy(logits, labels).double()
        scores[0] = -(losses * is_scored).sum(0)
        is_argmax = model.gather_logits(logits).argmax(-1) == labels
        scores[1] = (is_argmax | ~is_scored).all(0)
    model.wait_send()
    model.stage.set_positions(model.positions)
    sums, are_greedy = model.broadcast_from_last_stage(scores).tolist()
    return [Score(total, bool(is_greedy)) for total, is_greedy in zip(sums, are_greedy, strict=True)]


class ServedModel:
    """Model driven by rank 0: rank 0 broadcasts requests, and the other ranks execute them in `serve`.

    This allows rank 0 to run a single-process program on a sharded model.
    """

    def __init__(self, loaded: LoadedModel) -> None:
        self.loaded = loaded

    def score(self, sequences: Sequence[Sequence[int]], num_scored: Sequence[int]) -> list[Score]:
        """Broadcast a scoring request and run `score`; called on rank 0."""
        request = ScoreRequest(tuple(map(tuple, sequences)), tuple(num_scored))
        self._broadcast(request)
        return score(self.loaded, request)

    def generate(self, request: GenerateRequest) -> list[Completion]:
        """Broadcast a generation request and run `generate`; called on rank 0."""
        self._broadcast(request)
        return self._generate(request)

    def shutdown(self) -> None:
        """End `serve` on the other ranks; called on rank 0."""
        self._broadcast(None)

    def serve(self) -> None:
        """Execute requests of rank 0 until `shutdown`; called on all other ranks."""
        while (request := self._broadcast(None)) is not None:
            if isinstance(request, ScoreRequest):
                score(self.loaded, request)
            else:
                self._generate(request)

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
