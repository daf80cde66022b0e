"""`moefold eval`: mean cross-entropy of a model over a file of tokens or text."""

import argparse
import shutil
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from moefold.cli.command_parser import CommandParser
from moefold.cli.compute_options import add_compute_options
from moefold.cli.one_voice import one_voice
from moefold.cli.own_words import DEVICE, TOKENIZER, own_words
from moefold.cli.skipped import say_skipped
from moefold.errors import ConfigError
from moefold.launch.place import Place, check_world_size, find_place
from moefold.plan.output_file import check_place, refuse_existing
from moefold.printable import print_escaped

if TYPE_CHECKING:
    from moefold.inference.source import Source
    from moefold.inference.token_row import TokenRow

EPILOG = """MODEL is a checkpoint (RUN_DIR/checkpoints/step-000100), a folder of checkpoints or a run folder, of which
the newest complete one is taken, or a Hugging Face folder. The file is cut into sequences of S tokens, one after
another, and every token but the first of each is predicted. Tokens after the last whole sequence are left out,
unless --keep-tail. Without --seq-len, S is train.seq_len of the run, or, of a Hugging Face folder, its
max_position_embeddings, but at most 2048; stderr says so.

Overrides are parallel.tp, cp, pp, ep, etp, world_size (by default as many ranks as the others need), order, moe_order,
dispatcher, context; and moe.eval_capacity_factor, drop_policy, drop_scope: without them no token is dropped.

examples:
  moefold eval runs/quickstart --tokens held_out.npy --seq-len 256 --json
  moefold eval runs/quickstart --text README.md parallel.tp=2 parallel.ep=2
"""


MOST_DEFAULT_TOKENS = 2048
"""Models say that they take 128 k tokens and more, which few machines and texts have room for."""


def run(argv: list[str]) -> int:
    """Evaluate; returns the exit status."""
    arguments = _parser().parse_intermixed_args(argv)
    place = find_place()
    with one_voice(place):
        return _start(arguments, place)


def _start(arguments: argparse.Namespace, place: Place | None) -> int:
    from moefold.checkpoint.sound import refuse_cut
    from moefold.inference.memory import EVAL_WAY_OUT, batch_bytes
    from moefold.inference.settings import Wish, inference_config
    from moefold.inference.source import find_source
    from moefold.launch.fitting import check_inference, fitting_device

    if arguments.seq_len is not None and arguments.seq_len < 2:
        raise ConfigError(
            f"--seq-len {arguments.seq_len} must be at least 2: the first token of a sequence is not predicted"
        )
    if arguments.batch_size < 1:
        raise ConfigError(f"--batch-size {arguments.batch_size} must be at least 1")
    source = find_source(arguments.model)
    say_skipped(source.skipped, place)
    if arguments.seq_len is None:
        arguments.seq_len = _default_seq_len(source, place)
    wish = Wish(
        overrides=tuple(arguments.overrides),
        dtype=arguments.dtype,
        device=arguments.device,
        world_size=None if place is None else place.world_size,
        seq_len=arguments.seq_len,
        batch_size=arguments.batch_size,
    )
    cfg = inference_config(source, wish, "evaluate")
    if place is not None:
        check_world_size(place, cfg.parallel.world_size)
    _check_logits(arguments)

    from moefold.inference.text import encode_text, open_tokenizer, read_text
    from moefold.inference.token_row import TokenRow, check_row, open_ids

    if arguments.tokens is not None:
        name, given = f"--tokens {str(arguments.tokens)!r}", arguments.tokens
    else:
        name = f"--text {str(arguments.text)!r}"
        text = read_text(arguments.text, "--text")
        with own_words(*(TOKENIZER if arguments.tokenizer else ())):
            given = encode_text(source, open_tokenizer(source, arguments.tokenizer), text, name)
    ids = open_ids(given) if isinstance(given, Path) else given
    row = TokenRow(ids, arguments.seq_len, arguments.keep_tail)
    check_row(row, source.model.vocab_size, name)
    _check_space(arguments.logits, row, source.model.vocab_size)
    if cfg.moe.eval_capacity_factor <= 0:
        # Without a capacity, what fills a batch up changes nothing but the time it takes.
        batch_size = min(arguments.batch_size, -(-row.num_sequences // cfg.parallel.dp))
        cfg = inference_config(source, replace(wish, batch_size=batch_size), "evaluate")

    batch = f"a batch of {cfg.train.micro_batch_size} sequences of {cfg.train.seq_len} tokens"
    check = partial(check_inference, cfg, place=place, extra={batch: batch_bytes(cfg)}, way_out=EVAL_WAY_OUT)
    with own_words(*DEVICE):
        device_type = fitting_device(cfg.run.device, cfg.parallel.world_size, place, check)
    if source.kind == "checkpoint":
        refuse_cut(source.path)

    # torch takes seconds to import: everything above answers without it, where there is no GPU.
    from moefold.inference.rank import EvalJob, eval_rank
    from moefold.launch.ranks import run_ranks

    job = EvalJob(
        source=source,
        cfg=cfg,
        ids=given,
        seq_len=arguments.seq_len,
        keeps_tail=arguments.keep_tail,
        logits=arguments.logits,
        as_json=arguments.json,
    )
    return run_ranks(partial(eval_rank, job), cfg.parallel.world_size, device_type, place)


def _default_seq_len(source: "Source", place: Place | None) -> int:
    """Return the length of the samples of training, or else what the model takes, up to a bound; stderr says which."""
    if source.trained_len:
        seq_len = source.trained_len
        origin = "train.seq_len of the run"
    else:
        seq_len = min(source.context, MOST_DEFAULT_TOKENS)
        origin = f"what the model takes, {source.context}, up to {MOST_DEFAULT_TOKENS}"
    if place is None or place.rank == 0:
        print_escaped(f"--seq-len {seq_len}: {origin}", file=sys.stderr)
    return seq_len


def _check_logits(arguments: argparse.Namespace) -> None:
    path = arguments.logits
    if path is None:
        return
    if arguments.keep_tail:
        raise ConfigError("--logits writes whole sequences only, and --keep-tail adds a shorter one; leave one out")
    if path.suffix != ".npy":
        raise ConfigError(f"--logits {str(path)!r} must end in .npy, the form that is written")
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"--logits {str(path)!r}: the folder {str(path.absolute().parent)!r} does not exist")
    if path.is_dir():
        raise ConfigError(f"--logits {str(path)!r} is a folder; name a file in it: {str(path / 'logits.npy')!r}")
    read = arguments.tokens if arguments.tokens is not None else arguments.text
    if path.resolve() == read.resolve():
        raise ConfigError(f"--logits {str(path)!r} is the file that is read, which it would replace; name another one")
    refuse_existing("--logits", path, force=arguments.force)
    check_place("--logits", path)


def _check_space(path: Path | None, row: "TokenRow", vocab_size: int) -> None:
    """Refuse logits that the disk has no room for; a mapped file that finds none ends the process."""
    if path is None:
        return
    needed_bytes = 4 * row.num_sequences * row.seq_len * vocab_size
    free_bytes = shutil.disk_usage(path.absolute().parent).free
    if needed_bytes > free_bytes:
        raise ConfigError(
            f"--logits {str(path)!r} takes {needed_bytes / 1e9:,.1f} GB, and {free_bytes / 1e9:,.1f} GB are free; "
            "name a file on another disk, or evaluate less"
        )


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="moefold eval",
        description="Mean cross-entropy and perplexity of a model over a file. Starts the ranks itself on one\n"
        "machine; joins them under torchrun or srun.",
        epilog=EPILOG,
    )
    parser.add_argument("model", metavar="MODEL", help="checkpoint, run folder or Hugging Face folder")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="the mapping; see below")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--tokens", type=Path, metavar="FILE.npy", help="ids, one row of integers")
    source.add_argument("--text", type=Path, metavar="FILE", help="text in UTF-8, for the model's tokenizer")
    parser.add_argument("--seq-len", type=int, metavar="S", help="tokens of a sequence (that of the run; see above)")
    parser.add_argument("--keep-tail", action="store_true", help="evaluate what is left at the end, as a shorter one")
    parser.add_argument(
        "--batch-size", type=int, default=8, metavar="N", help="sequences at once on each data-parallel rank (8)"
    )
    parser.add_argument("--logits", type=Path, metavar="OUT.npy", help="write float32 logits [sequences, S, V]")
    parser.add_argument("--force", action="store_true", help="replace the file of --logits if it exists")
    parser.add_argument("--tokenizer", default="", metavar="PATH", help="for --text: bytes or a tokenizer.json")
    add_compute_options(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object: loss, perplexity, tokens")
    return parser
