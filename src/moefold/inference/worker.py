"""Workers of `moefold eval` and `moefold generate`: the functions that each rank runs."""

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
    """Checked arguments of one evaluation."""

    source: ModelSource
    cfg: Config
    ids: np.ndarray | Path
    """Token ids, or the .npy file that contains them."""
    seq_len: int
    keeps_tail: bool
    logits: Path | None
    as_json: bool


def eval_worker(job: EvalJob, rank_env: RankEnv, device_type: str) -> int:
    """Join the process group, evaluate and print the result on rank 0; return the exit status."""
    with (
        RankErrorHandler(rank_env, lambda: False),
        init_distributed(rank_env, device_type) as device,
        explain_oom(EVAL_OOM_HINT),
    ):
        loaded = load_model(job.source, job.cfg, device)
        ids = open_ids(job.ids) if isinstance(job.ids, Path) else job.ids
        dataset = TokenDataset(ids, job.seq_len, job.keeps_tail)
        with nullcontext() if job.logits is None else LogitsFile(job.logits, loaded, dataset) as file:
            evaluation = evaluate(loaded, dataset, file)
        if rank_env.rank == 0:
            _print_evaluation(evaluation, dataset, as_json=job.as_json)
    return 0


def _print_evaluation(found: Evaluation, dataset: TokenDataset, *, as_json: bool) -> None:
    if dataset.num_unused_tokens:
        print(
            f"{dataset.num_unused_tokens} tokens after the last sequence of {dataset.seq_len} are left out; "
            "--keep-tail includes them",
            file=sys.stderr,
        )
    if as_json:
        # JSON has neither NaN nor infinity.
        loss, perplexity = (x if math.isfinite(x) else None for x in (found.loss, found.perplexity))
        print(json.dumps({"loss": loss, "perplexity": perplexity, "tokens": found.tokens}))
        return
    print(
        f"loss {found.loss:.6f} nats per token, perplexity {found.perplexity:.6g}, over {found.tokens:,} tokens in "
        f"{dataset.num_sequences} sequences"
    )


@dataclass(frozen=True)
class GenerateJob:
    """Checked arguments of one generation command."""

    source: ModelSource
    cfg: Config
    tokenizer: str
    """"bytes" or a path to use instead of the source's tokenizer; "" uses the source's."""
    prompts: tuple[str, ...]
    ids: tuple[tuple[int, ...], ...]
    """Token ids of the prompts."""
    max_tokens: int
    sampling: SamplingParams
    eos_ids: frozenset[int]
    as_json: bool
    echoes: bool = True
    """Whether to print each prompt before its continuation."""
    is_chat: bool = False
    """Whether the prompts are chat messages; `ids` then include the chat template."""
    stop_string: str = ""
    """Text that ends a continuation, if no single token does."""


def generate_worker(job: GenerateJob, rank_env: RankEnv, device_type: str) -> int:
    """Join the process group, generate and print the text on rank 0; return the exit status."""
    with (
        RankErrorHandler(rank_env, lambda: False),
        init_distributed(rank_env, device_type) as device,
        explain_oom(GENERATE_OOM_HINT),
    ):
        tokenizer = open_tokenizer(job.source, job.tokenizer)
        loaded = load_model(job.source, job.cfg, device, tokenizer)
        is_streaming = rank_env.rank == 0 and len(job.ids) == 1 and not job.as_json
        output = _StreamedOutput(job, tokenizer, exits_on_broken_pipe=rank_env.world_size == 1)
        if is_streaming:
            output.begin()
        completions = generate(
            loaded.model,
            job.ids,
            job.max_tokens,
            job.sampling,
            eos_ids=job.eos_ids,
            on_token=lambda _, token: output.push(token) if is_streaming else None,
            is_complete=partial(_has_stop_string, tokenizer, job.stop_string)
            if job.stop_string
            else lambda number, tokens: False,
        )
        if is_streaming:
            output.finish()
        elif rank_env.rank == 0:
            _print_completions(job, completions, tokenizer)
    return 0


class _StreamedOutput:
    """Streaming output of a single continuation, after its prompt if the prompt is echoed.

    Args:
        job: a job with one prompt.
        tokenizer: tokenizer of the model.
        exits_on_broken_pipe: whether a closed pipe (`| head`) ends the program; if not, the remaining output is
            discarded, as the other ranks need this one for their collectives.
    """

    def __init__(self, job: GenerateJob, tokenizer: Tokenizer, *, exits_on_broken_pipe: bool) -> None:
        self._job = job
        # Some tokenizers put a space between two ids that neither has alone: decode with the prompt as context.
        has_context = job.echoes and not job.is_chat
        self._stream = TextStream(tokenizer, job.ids[0] if has_context else ())
        self._stop_filter = StopStringFilter(job.stop_string)
        self._exits_on_broken_pipe = exits_on_broken_pipe

    def begin(self) -> None:
        """Print the prompt, if `job.echoes`."""
        if self._job.echoes:
            prompt = self._job.prompts[0]
            self._print(f"user: {prompt}\nassistant: " if self._job.is_chat else prompt)

    def push(self, token: int) -> None:
        """Add a token and print the text that is now final."""
        self._print(self._stop_filter.push(self._stream.push(token)))

    def finish(self) -> None:
        """Print the remaining text and a newline."""
        self._print(self._stop_filter.push(self._stream.finish()) + self._stop_filter.finish() + "\n")

    def _print(self, text: str) -> None:
        try:
            print(_terminal_text(text), end="", flush=True)
        except BrokenPipeError:
            if self._exits_on_broken_pipe:
                raise
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _terminal_text(text: str) -> str:
    """Return generated text with control characters escaped if stdout is a terminal."""
    return printable(text, MULTILINE_CHARS) if sys.stdout.isatty() else text


def _has_stop_string(tokenizer: Tokenizer, stop_string: str, number: int, tokens: Sequence[int]) -> bool:
    """Return whether the last tokens contain the stop string."""
    # Each token has at least one byte; 4 more, as the first ones may be part of a character.
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
