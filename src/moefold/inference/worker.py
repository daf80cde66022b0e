"""Workers of `moefold eval` and `moefold generate`: the functions that each rank runs."""

import json
import math
import os
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Literal

import torch

from moefold.comm.collectives import all_gather_objects
from moefold.data.tokenizer import Tokenizer
from moefold.host.rank_env import RankEnv
from moefold.inference.engine.engine import GenerationEngine, TokenCallback
from moefold.inference.engine.requests import Completion
from moefold.inference.jobs import EvalJob, GenerateJob
from moefold.inference.load import joined_job, load_model, report_decoding
from moefold.inference.scoring import Evaluation, LogitsFile, evaluate
from moefold.inference.settings import eval_oom_hint, generate_oom_hint
from moefold.inference.text import open_tokenizer
from moefold.inference.text_stream import StopStringFilter, TextStream, has_stop_string
from moefold.inference.token_dataset import TokenDataset
from moefold.terminal import MULTILINE_CHARS, printable


@dataclass(frozen=True)
class Generation:
    """Text generated for one prompt."""

    prompt: str
    text: str
    """Text that continues the prompt, without the prompt itself."""
    tokens: tuple[int, ...]
    """New tokens without the token that ended the text."""
    finish_reason: Literal["length", "eos"]
    """Reason for the end: the limit of tokens, or the end of the text or of the turn."""


def evaluate_on_rank(job: EvalJob, rank_env: RankEnv, device_type: str) -> Evaluation:
    """Join the job and evaluate. The result is the same on every rank."""
    with joined_job(rank_env, device_type, eval_oom_hint()) as device:
        return _evaluate(job, device)


def eval_worker(job: EvalJob, as_json: bool, rank_env: RankEnv, device_type: str) -> int:
    """Join the job, evaluate, print the result on the first rank, and return the exit status."""
    with joined_job(rank_env, device_type, eval_oom_hint()) as device:
        result = _evaluate(job, device)
        if rank_env.rank == 0:
            _print_evaluation(result, job.dataset(), as_json=as_json)
    return 0


def _evaluate(job: EvalJob, device: torch.device) -> Evaluation:
    loaded = load_model(job.source, job.cfg, device)
    dataset = job.dataset()
    with nullcontext() if job.logits is None else LogitsFile(job.logits, loaded, dataset) as file:
        return evaluate(loaded, dataset, file)


def _print_evaluation(result: Evaluation, dataset: TokenDataset, *, as_json: bool) -> None:
    if dataset.num_unused_tokens:
        print(
            f"{dataset.num_unused_tokens} tokens after the last sequence of {dataset.seq_len} are left out; "
            "--keep-tail includes them",
            file=sys.stderr,
        )
    if as_json:
        # JSON has no NaN and no infinity.
        loss, perplexity = (x if math.isfinite(x) else None for x in (result.loss, result.perplexity))
        print(json.dumps({"loss": loss, "perplexity": perplexity, "tokens": result.tokens}))
        return
    print(
        f"loss {result.loss:.6f} nats per token, perplexity {result.perplexity:.6g}, over {result.tokens:,} tokens in "
        f"{dataset.num_sequences} sequences"
    )


def generate_on_rank(job: GenerateJob, rank_env: RankEnv, device_type: str) -> list[Generation]:
    """Join the job and generate. The result is the same on every rank."""
    with joined_job(rank_env, device_type, generate_oom_hint()) as device:
        tokenizer = open_tokenizer(job.source, job.tokenizer)
        return _finished_texts(job, _generate(job, device, tokenizer, lambda _, token: None), tokenizer)


def generate_worker(job: GenerateJob, rank_env: RankEnv, device_type: str, *, as_json: bool, echoes: bool) -> int:
    """Join the job, generate, print on the first rank, and return the exit status."""
    with joined_job(rank_env, device_type, generate_oom_hint()) as device:
        tokenizer = open_tokenizer(job.source, job.tokenizer)
        streams = rank_env.rank == 0 and len(job.requests) == 1 and not as_json
        output = _StreamedOutput(job, tokenizer, echoes=echoes, exits_on_broken_pipe=rank_env.world_size == 1)
        completions = _generate(
            job,
            device,
            tokenizer,
            lambda _, token: output.push(token) if streams else None,
            output if streams else None,
        )
        if streams:
            output.finish()
        elif rank_env.rank == 0:
            for number, reply in enumerate(_finished_texts(job, completions, tokenizer), 1):
                if as_json:
                    fields = {"prompt": reply.prompt, "text": reply.text, "tokens": reply.tokens}
                    print(json.dumps(fields | {"end": reply.finish_reason}))
                else:
                    print(_terminal_text(f"--- {number}{f': {reply.prompt}' if echoes else ''}\n{reply.text}"))
    return 0


def _generate(
    job: GenerateJob,
    device: torch.device,
    tokenizer: Tokenizer,
    on_token: TokenCallback,
    output: "_StreamedOutput | None" = None,
) -> list[Completion]:
    """Load the model and continue the prompts. The output begins after loading.

    Each data-parallel rank continues its share of the prompts. All ranks return all completions.
    """
    loaded = load_model(job.source, job.cfg, device, tokenizer)
    report_decoding(loaded, job.cfg.run)
    if output is not None:
        output.begin()
    dp = loaded.model.groups.attn.dp
    completions = GenerationEngine(loaded.model, job.settings, job.sampling).generate(
        job.requests[dp.rank :: dp.size],
        on_token,
        (lambda _, tokens: has_stop_string(tokenizer, [job.stop_string], tokens)) if job.stop_string else None,
    )
    shares = all_gather_objects(completions, dp)
    return [shares[i % dp.size][i // dp.size] for i in range(len(job.requests))]


class _StreamedOutput:
    """Output of a single continuation while it is generated, after its prompt if that is echoed.

    If the reader ends (`| head`), the program ends with one rank. With more, the remaining text is discarded, because
    the other ranks wait for this rank.
    """

    def __init__(self, job: GenerateJob, tokenizer: Tokenizer, *, echoes: bool, exits_on_broken_pipe: bool) -> None:
        self._job = job
        self._echoes = echoes
        # Some tokenizers write a space between two ids although none of them has it: it must follow the prompt.
        joins = echoes and not job.is_chat
        self._stream = TextStream(tokenizer, job.requests[0].prompt if joins else ())
        self._stop_filter = StopStringFilter(job.stop_string)
        self._exits_on_broken_pipe = exits_on_broken_pipe

    def begin(self) -> None:
        """Print the prompt, if prompts are echoed."""
        if self._echoes:
            prompt = self._job.prompts[0]
            self._print(f"user: {prompt}\nassistant: " if self._job.is_chat else prompt)

    def push(self, token: int) -> None:
        """Add a token and print the text that is now final. An end-of-text token has no text."""
        if token in self._job.requests[0].eos_ids:
            return
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


def _finished_texts(job: GenerateJob, completions: Sequence[Completion], tokenizer: Tokenizer) -> list[Generation]:
    """Return the completions as text, each truncated before the stop string."""
    texts = []
    for prompt, completion in zip(job.prompts, completions, strict=True):
        tokens = completion.tokens[:-1] if completion.finish_reason == "eos" else completion.tokens
        text = tokenizer.decode(tokens)
        if completion.finish_reason == "stop":
            text = text.partition(job.stop_string)[0]
            while tokens and len(tokenizer.decode(tokens)) > len(text):
                tokens = tokens[:-1]
        reason: Literal["length", "eos"] = "length" if completion.finish_reason == "length" else "eos"
        texts.append(Generation(prompt, text, tokens, reason))
    return texts
