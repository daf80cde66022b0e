"""What each rank of `moefold eval` and `moefold generate` runs."""

import json
import math
import os
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from moefold.config.schema import Config
from moefold.data.tokenizer import Tokenizer
from moefold.host.rank_env import RankEnv
from moefold.inference.evaluate import Evaluation, LogitsFile, evaluate
from moefold.inference.generate import Completion, generate
from moefold.inference.load import load_model
from moefold.inference.sampling import SamplingParams
from moefold.inference.settings import EVAL_OOM_HINT, GENERATE_OOM_HINT, explain_oom
from moefold.inference.source import ModelSource
from moefold.inference.text import StopStringFilter, TextStream, open_tokenizer
from moefold.inference.token_dataset import TokenDataset, open_ids
from moefold.launch.failure import RankErrorHandler
from moefold.launch.ranks import init_distributed
from moefold.terminal import MULTILINE_CHARS, printable


@dataclass(frozen=True)
class EvalJob:
    """One evaluation; checked."""

    source: ModelSource
    cfg: Config
    ids: np.ndarray | Path
    """The row of ids, or the .npy file that holds it."""
    seq_len: int
    keeps_tail: bool
    logits: Path | None
    as_json: bool


def eval_worker(job: EvalJob, rank_env: RankEnv, device_type: str) -> int:
    """Join the job, evaluate, print the result on the first rank; returns the exit status."""
    with (
        RankErrorHandler(rank_env, lambda: False),
        init_distributed(rank_env, device_type) as device,
        explain_oom(EVAL_OOM_HINT),
    ):
        opened = load_model(job.source, job.cfg, device)
        ids = open_ids(job.ids) if isinstance(job.ids, Path) else job.ids
        row = TokenDataset(ids, job.seq_len, job.keeps_tail)
        with nullcontext() if job.logits is None else LogitsFile(job.logits, opened, row) as file:
            found = evaluate(opened, row, file)
        if rank_env.rank == 0:
            _print_evaluation(found, row, as_json=job.as_json)
    return 0


def _print_evaluation(found: Evaluation, dataset: TokenDataset, *, as_json: bool) -> None:
    if dataset.num_unused_tokens:
        print(
            f"{dataset.num_unused_tokens} tokens behind the last sequence of {dataset.seq_len} are left out; --keep-tail takes them",
            file=sys.stderr,
        )
    if as_json:
        # JSON knows neither NaN nor infinity.
        loss, perplexity = (x if math.isfinite(x) else None for x in (found.loss, found.perplexity))
        print(json.dumps({"loss": loss, "perplexity": perplexity, "tokens": found.tokens}))
        return
    print(
        f"loss {found.loss:.6f} nats per token, perplexity {found.perplexity:.6g}, over {found.tokens:,} tokens in "
        f"{dataset.num_sequences} sequences"
    )


@dataclass(frozen=True)
class GenerateJob:
    """One batch of prompts; checked."""

    source: ModelSource
    cfg: Config
    tokenizer: str
    """"bytes" or a path that wins over what the source says; "" takes that."""
    prompts: tuple[str, ...]
    ids: tuple[tuple[int, ...], ...]
    """The prompts as ids."""
    max_tokens: int
    sampling: SamplingParams
    eos_ids: frozenset[int]
    as_json: bool
    echoes: bool = True
    """Print each prompt before its continuation."""
    is_chat: bool = False
    """The prompts are messages; `ids` are those of the chat template around them."""
    stop_string: str = ""
    """A text that ends a continuation, where no single token does."""


def generate_worker(job: GenerateJob, rank_env: RankEnv, device_type: str) -> int:
    """Join the job, generate, print on the first rank; returns the exit status."""
    with (
        RankErrorHandler(rank_env, lambda: False),
        init_distributed(rank_env, device_type) as device,
        explain_oom(GENERATE_OOM_HINT),
    ):
        tokenizer = open_tokenizer(job.source, job.tokenizer)
        opened = load_model(job.source, job.cfg, device, tokenizer)
        streams = rank_env.rank == 0 and len(job.ids) == 1 and not job.as_json
        output = _StreamedOutput(job, tokenizer, exits_on_broken_pipe=rank_env.world_size == 1)
        if streams:
            output.begin()
        found = generate(
            opened.model,
            job.ids,
            job.max_tokens,
            job.sampling,
            eos_ids=job.eos_ids,
            on_token=lambda _, token: output.push(token) if streams else None,
            is_complete=partial(_has_stop_string, tokenizer, job.stop_string)
            if job.stop_string
            else lambda number, tokens: False,
        )
        if streams:
            output.finish()
        elif rank_env.rank == 0:
            _print_completions(job, found, tokenizer)
    return 0


class _StreamedOutput:
    """The one continuation that is printed while it comes, after its prompt if that is echoed.

    Args:
        job: with one prompt.
        tokenizer: of the model.
        exits_on_broken_pipe: whether the program ends when the reader has gone (`| head`); if not, the rest goes into the
            void, as other ranks count on this one to go on.
    """

    def __init__(self, job: GenerateJob, tokenizer: Tokenizer, *, exits_on_broken_pipe: bool) -> None:
        self._job = job
        # Some tokenizers write a space between two ids that neither has alone: it must be seen after the prompt.
        joins = job.echoes and not job.is_chat
        self._stream = TextStream(tokenizer, job.ids[0] if joins else ())
        self._stop_filter = StopStringFilter(job.stop_string)
        self._exits_on_broken_pipe = exits_on_broken_pipe

    def begin(self) -> None:
        """Print the prompt, if it is to be echoed."""
        if self._job.echoes:
            prompt = self._job.prompts[0]
            self._print(f"user: {prompt}\nassistant: " if self._job.is_chat else prompt)

    def push(self, token: int) -> None:
        """Print what one more token makes final."""
        self._print(self._stop_filter.push(self._stream.push(token)))

    def finish(self) -> None:
        """Print what was still waiting, and a line end."""
        self._print(self._stop_filter.push(self._stream.finish()) + self._stop_filter.finish() + "\n")

    def _print(self, text: str) -> None:
        try:
            print(_terminal_text(text), end="", flush=True)
        except BrokenPipeError:
            if self._exits_on_broken_pipe:
                raise
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _terminal_text(text: str) -> str:
    """What a model writes, as a terminal may have it; a file gets every character."""
    return printable(text, MULTILINE_CHARS) if sys.stdout.isatty() else text


def _has_stop_string(tokenizer: Tokenizer, stop_string: str, number: int, tokens: Sequence[int]) -> bool:
    """Whether the newest tokens spell the mark."""
    # Each token is a byte at least, and the first of these may be half a character.
    return stop_string in tokenizer.decode(tokens[-len(stop_string.encode()) - 4 :])


def _print_completions(job: GenerateJob, found: list[Completion], tokenizer: Tokenizer) -> None:
    for number, (prompt, continuation) in enumerate(zip(job.prompts, found, strict=True)):
        tokens = continuation.tokens
        text = tokenizer.decode(tokens)
        end: str = continuation.finish_reason
        if end == "stop":
            text = text.partition(job.stop_string)[0]
            end = "eos"
            while tokens and len(tokenizer.decode(tokens)) > len(text):
                tokens = tokens[:-1]
        if job.as_json:
            print(json.dumps({"prompt": prompt, "text": text, "tokens": tokens, "end": end}))
        else:
            print(_terminal_text(f"--- {number + 1}{f': {prompt}' if job.echoes else ''}\n{text}"))
