"""What each rank of `moefold eval` and `moefold generate` runs."""

import json
import math
import os
import sys
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from moefold.config.schema import Config
from moefold.data.tokenizer import Tokenizer
from moefold.inference.evaluate import Evaluation, LogitsFile, evaluate
from moefold.inference.generate import Continuation, generate
from moefold.inference.memory import batch_bytes, cache_bytes, memory_or, refuse_too_large
from moefold.inference.opening import open_model
from moefold.inference.sampling import Sampling
from moefold.inference.source import Source
from moefold.inference.text import TextStream, open_tokenizer
from moefold.inference.token_row import TokenRow, open_ids
from moefold.launch.failure import FailingRank
from moefold.launch.place import Place
from moefold.launch.ranks import joined


@dataclass(frozen=True)
class EvalJob:
    """One evaluation; checked."""

    source: Source
    cfg: Config
    ids: np.ndarray | Path
    """The row of ids, or the .npy file that holds it."""
    seq_len: int
    keeps_tail: bool
    logits: Path | None
    as_json: bool


def eval_rank(job: EvalJob, place: Place, device_type: str) -> int:
    """Join the job, evaluate, print the result on the first rank; returns the exit status."""
    way_out = "give a smaller --batch-size or --seq-len, or cut the model with parallel.tp and pp"
    with FailingRank(place, lambda: False), joined(place, device_type) as device, memory_or(way_out):
        what = f"a batch of {job.cfg.train.micro_batch_size} sequences of {job.cfg.train.seq_len} tokens"
        refuse_too_large(what, batch_bytes(job.cfg), device, way_out)
        opened = open_model(job.source, job.cfg, device)
        ids = open_ids(job.ids) if isinstance(job.ids, Path) else job.ids
        row = TokenRow(ids, job.seq_len, job.keeps_tail)
        with nullcontext() if job.logits is None else LogitsFile(job.logits, opened, row) as file:
            found = evaluate(opened, row, file)
        if place.rank == 0:
            _print_evaluation(found, row, as_json=job.as_json)
    return 0


def _print_evaluation(found: Evaluation, row: TokenRow, *, as_json: bool) -> None:
    if row.num_left_out:
        print(
            f"{row.num_left_out} tokens behind the last sequence of {row.seq_len} are left out; --keep-tail takes them",
            file=sys.stderr,
        )
    if as_json:
        # JSON knows neither NaN nor infinity.
        loss, perplexity = (x if math.isfinite(x) else None for x in (found.loss, found.perplexity))
        print(json.dumps({"loss": loss, "perplexity": perplexity, "tokens": found.tokens}))
        return
    print(
        f"loss {found.loss:.6f} nats per token, perplexity {found.perplexity:.6g}, over {found.tokens:,} tokens in "
        f"{row.num_sequences} sequences"
    )


@dataclass(frozen=True)
class GenerateJob:
    """One batch of prompts; checked."""

    source: Source
    cfg: Config
    tokenizer: str
    """"bytes" or a path that wins over what the source says; "" takes that."""
    prompts: tuple[str, ...]
    ids: tuple[tuple[int, ...], ...]
    """The prompts as ids."""
    max_tokens: int
    sampling: Sampling
    eos_ids: frozenset[int]
    as_json: bool


def generate_rank(job: GenerateJob, place: Place, device_type: str) -> int:
    """Join the job, generate, print on the first rank; returns the exit status."""
    way_out = "give a smaller --max-tokens or fewer prompts, or cut the model with parallel.tp and pp"
    with FailingRank(place, lambda: False), joined(place, device_type) as device, memory_or(way_out):
        num_tokens, num_prompts = job.cfg.train.seq_len, len(job.prompts)
        what = f"the cache of {num_prompts} prompt{'s' * (num_prompts > 1)} and --max-tokens {job.max_tokens}"
        refuse_too_large(what, cache_bytes(job.cfg, num_tokens, num_prompts), device, way_out)
        tokenizer = open_tokenizer(job.source, job.tokenizer)
        opened = open_model(job.source, job.cfg, device, tokenizer)
        stream = TextStream(tokenizer)
        streams = place.rank == 0 and len(job.ids) == 1 and not job.as_json
        show = print if place.world_size == 1 else _print_while_read
        found = generate(
            opened.model,
            job.ids,
            job.max_tokens,
            job.sampling,
            eos_ids=job.eos_ids,
            watch=lambda _, token: show(stream.push(token), end="", flush=True) if streams else None,
        )
        if streams:
            show(stream.finish(), flush=True)
        elif place.rank == 0:
            _print_continuations(job, found, tokenizer)
    return 0


def _print_while_read(text: str, *, end: str = "\n", flush: bool = False) -> None:
    """Print; once the reader has gone (`| head`), into the void: the other ranks count on this one to go on."""
    try:
        print(text, end=end, flush=flush)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _print_continuations(job: GenerateJob, found: list[Continuation], tokenizer: Tokenizer) -> None:
    for number, (prompt, continuation) in enumerate(zip(job.prompts, found, strict=True)):
        text = tokenizer.decode(continuation.tokens)
        if job.as_json:
            record = {"prompt": prompt, "text": text, "tokens": continuation.tokens, "end": continuation.end}
            print(json.dumps(record))
        else:
            print(f"--- {number + 1}: {prompt}\n{text}")
