"""Log-likelihood scoring and evaluation of token sequences, under any mapping, and a model served to one process."""

import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
import torch
from torch import Tensor

from moefold.comm.collectives import all_gather_objects, all_reduce_sum, broadcast_object
from moefold.config.chosen import chosen_in
from moefold.config.groups.context import ContextPart
from moefold.inference.engine.engine import GenerationEngine
from moefold.inference.engine.requests import Completion, EngineSettings, Request
from moefold.inference.load import LoadedModel
from moefold.inference.sampling import SamplingParams
from moefold.inference.text_stream import has_stop_string
from moefold.inference.token_dataset import TokenDataset
from moefold.model.loss import token_losses
from moefold.parallel.context_parallel import sequence_positions
from moefold.terminal import print_escaped


@dataclass(frozen=True)
class Score:
    """Score of the last tokens of a sequence."""

    log_likelihood: float
    """Sum of the tokens' log-probabilities, in nats."""
    is_greedy: bool
    """For each token, True if it is the argmax at its position."""


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
    batch_size: int
    """Prompts of each data-parallel rank at a time."""


@torch.no_grad()
def score(loaded: LoadedModel, request: ScoreRequest) -> list[Score]:
    """Score sequences in one batch on each data-parallel rank, without cp. It is collective, returned on all ranks.

    Sequences have at least two tokens. All tokens except the first can be scored.
    """
    model = loaded.model
    device = loaded.model.groups.device
    tp = loaded.model.groups.attn.tp.size
    width = -(-(max(map(len, request.sequences)) - 1) // tp) * tp
    dp = loaded.model.groups.attn.dp
    sequence_ids = range(dp.rank, len(request.sequences), dp.size)
    tokens = torch.zeros(len(sequence_ids), width, dtype=torch.int64)
    labels = torch.zeros_like(tokens)
    is_scored = torch.zeros_like(tokens, dtype=torch.bool)
    is_token = torch.zeros_like(is_scored)
    for i, number in enumerate(sequence_ids):
        sequence = request.sequences[number]
        count = request.num_scored[number]
        end = len(sequence) - 1
        tokens[i, :end] = torch.tensor(sequence[:-1])
        is_token[i, :end] = True
        labels[i, :end] = torch.tensor(sequence[1:])
        is_scored[i, end - count : end] = True
    model.stage.set_positions(torch.arange(width, device=device))
    logits = model.forward(tokens.to(device), is_token=None if is_token.all() else is_token.to(device))
    scores = torch.zeros(2, len(request.sequences), dtype=torch.float64, device=device)
    own_scores = scores[:, dp.rank :: dp.size]
    if logits is not None:
        labels, is_scored = labels.t().to(device), is_scored.t().to(device)
        losses = token_losses(logits, labels, model.stage.head.vocab_parallel.vocab_range).loss.double()
        own_scores[0] = -(losses * is_scored).sum(0)
        is_argmax = model.stage.head.vocab_parallel.gather(logits).argmax(-1) == labels
        own_scores[1] = (is_argmax | ~is_scored).all(0)
    model.wait_send()
    model.stage.set_positions(model.positions)
    if loaded.model.groups.attn.tp.rank:
        # All tp ranks of the last stage have the same scores, so only one of them is used.
        scores.zero_()
    sums, are_greedy = all_reduce_sum(scores, loaded.model.groups.world).tolist()
    return [Score(total, bool(is_greedy)) for total, is_greedy in zip(sums, are_greedy, strict=True)]


class ServedModel:
    """Model controlled by rank 0, which broadcasts requests. The other ranks execute them in `serve`.

    This allows rank 0 to run a single-process program on a sharded model.
    """

    def __init__(self, loaded: LoadedModel) -> None:
        self.loaded = loaded

    def score(self, sequences: Sequence[Sequence[int]], num_scored: Sequence[int]) -> list[Score]:
        """Broadcast a scoring request and run `score`. Rank 0 calls it."""
        request = ScoreRequest(tuple(map(tuple, sequences)), tuple(num_scored))
        self._broadcast(request)
        return score(self.loaded, request)

    def generate(self, request: GenerateRequest) -> list[Completion]:
        """Broadcast a generation request and run `generate`. Rank 0 calls it."""
        self._broadcast(request)
        return self._generate(request)

    def shutdown(self) -> None:
        """End `serve` on the other ranks. Rank 0 calls it."""
        self._broadcast(None)

    def serve(self) -> None:
        """Execute requests of rank 0 until `shutdown`. All other ranks call it."""
        while (request := self._broadcast(None)) is not None:
            if isinstance(request, ScoreRequest):
                score(self.loaded, request)
            else:
                self._generate(request)

    def _broadcast(self, request: ScoreRequest | GenerateRequest | None) -> ScoreRequest | GenerateRequest | None:
        return broadcast_object(request, self.loaded.model.groups.world, 0)

    def _generate(self, request: GenerateRequest) -> list[Completion]:
        tokenizer = self.loaded.tokenizer
        assert tokenizer is not None or not request.stops

        def is_complete(number: int, tokens: Sequence[int]) -> bool:
            assert tokenizer is not None
            return has_stop_string(tokenizer, request.stops, tokens)

        requests = [
            Request(prompt=prompt, prompt_number=i, max_tokens=request.max_tokens, eos_ids=request.eos_ids)
            for i, prompt in enumerate(request.prompts)
        ]
        dp = self.loaded.model.groups.attn.dp
        settings = EngineSettings(slots=request.batch_size, cache_gib=0)
        engine = GenerationEngine(self.loaded.model, settings, request.sampling)
        completions = engine.generate(requests[dp.rank :: dp.size], is_complete=is_complete if request.stops else None)
        shares = all_gather_objects(completions, dp)
        return [shares[i % dp.size][i // dp.size] for i in range(len(requests))]


PROGRESS_INTERVAL_S = 10.0
"""Interval of the progress lines of long evaluations."""


@dataclass(frozen=True)
class Evaluation:
    """Loss of a model on a sequence of tokens."""

    loss: float
    """Mean cross-entropy of the predicted tokens, in nats."""
    tokens: int
    """Number of predicted tokens, over which the loss is the mean."""

    @property
    def perplexity(self) -> float:
        """Perplexity, exp(loss), or infinity on overflow."""
        return math.exp(self.loss) if self.loss < math.log(sys.float_info.max) else math.inf


def evaluate(loaded: LoadedModel, dataset: TokenDataset, logits: "LogitsFile | None" = None) -> Evaluation:
    """Evaluate every sequence of a dataset, equal on every rank, once. It is collective over all ranks.

    Each data-parallel rank runs micro_batch_size sequences at once. The first rank of the last stage writes the logits.
    """
    model = loaded.model
    groups = loaded.model.groups
    train = model.stage.settings.train
    width = train.seq_len
    count = train.micro_batch_size
    total = torch.zeros(1, dtype=torch.float64, device=groups.device)
    next_line_s = time.monotonic() + PROGRESS_INTERVAL_S
    for first in range(0, dataset.num_sequences, count * groups.attn.dp.size):
        batch = dataset.batch(first + groups.attn.dp.rank * count, count, width)
        tokens, labels, is_target, is_token = (
            torch.from_numpy(values).to(groups.device)[:, model.positions] for values in batch
        )
        y = model.forward(tokens, is_token=None if batch[3].all() else is_token)
        if y is not None:
            losses = token_losses(y, labels.t(), model.stage.head.vocab_parallel.vocab_range).loss
            if groups.attn.tp.rank == 0:
                total += losses.double().mul(is_target.t()).sum()
            if logits is not None:
                logits.write(first, model.gather_to_first(y.float().cpu().transpose(0, 1)))
        if groups.rank == 0 and time.monotonic() >= next_line_s:
            next_line_s = time.monotonic() + PROGRESS_INTERVAL_S
            print_escaped(f"{first} of {dataset.num_sequences} sequences", file=sys.stderr, flush=True)
    model.wait_send()
    loss = float(all_reduce_sum(total, groups.world)) / dataset.num_predicted
    return Evaluation(loss, dataset.num_predicted)


class LogitsFile:
    """Context manager for float32 logits [sequences, S, V] in a memory-mapped .npy file, written by batch.

    The file has a temporary name until it is complete. Only the first rank of the last stage opens and writes it.
    """

    def __init__(self, path: Path, loaded: LoadedModel, dataset: TokenDataset) -> None:
        groups = loaded.model.groups
        self._path = path
        self._tmp_path = path.with_name(f".{path.name}.partial")
        self._dataset = dataset
        stage = loaded.model.stage
        self._vocab_size = stage.config.vocab_size
        self._is_writer = stage.is_last and groups.attn.stage.rank == 0
        layout = groups.layout
        self._rank_coordinates = [
            tuple(layout.attention.coordinate(rank, axis) for axis in ("dp", "cp", "tp"))
            for rank in groups.attn.stage.ranks
        ]
        context = chosen_in(loaded.parallel, ContextPart)
        seq_len = stage.settings.train.seq_len
        self._positions = [sequence_positions(context, seq_len, layout.cp, i).numpy() for i in range(layout.cp)]
        self._file: np.ndarray | None = None

    def __enter__(self) -> Self:
        if self._is_writer:
            shape = (self._dataset.num_sequences, self._dataset.seq_len, self._vocab_size)
            self._file = np.lib.format.open_memmap(self._tmp_path, mode="w+", dtype=np.float32, shape=shape)
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._file is None:
            return
        if isinstance(self._file, np.memmap):
            self._file.flush()
        self._file = None
        if error is None:
            self._tmp_path.replace(self._path)
        else:
            self._tmp_path.unlink(missing_ok=True)

    def write(self, first: int, shards: Tensor | None) -> None:
        """Write the logits of the sequences from index `first` on, which is the first data-parallel rank's.

        Args:
            shards: logits of every rank of the stage, [dp*cp*tp, B, S/cp, V/tp], or None on ranks that do not write.
        """
        if shards is None or self._file is None:
            return
        for (dp_rank, cp_rank, tp_rank), shard in zip(self._rank_coordinates, shards.numpy(), strict=True):
            batch_size, _, num_columns = shard.shape
            start = first + dp_rank * batch_size
            stop = min(start + batch_size, len(self._file))
            positions = self._positions[cp_rank]
            is_real = positions < self._dataset.seq_len
            columns = slice(tp_rank * num_columns, (tp_rank + 1) * num_columns)
            for i in range(start, stop):
                self._file[i, positions[is_real], columns] = shard[i - start, is_real]
