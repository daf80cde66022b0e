"""`moefold eval`: mean cross-entropy of a model over a file of tokens or text."""

import argparse
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from moefold.cli.compute_options import add_compute_options
from moefold.cli.one_voice import one_voice
from moefold.cli.skipped import say_skipped
from moefold.errors import ConfigError
from moefold.launch.place import Place, check_world_size, find_place

if TYPE_CHECKING:
    from moefold.inference.token_row import TokenRow

EPILOG = """MODEL is a checkpoint (RUN_DIR/checkpoints/step-000100), a folder of checkpoints or a run folder, of which
the newest complete one is taken, or a Hugging Face folder. The file is cut into sequences of S tokens, one after
another, and every token but the first of each is predicted. Tokens behind the last whole sequence are left out,
unless --keep-tail.

Overrides are parallel.tp, cp, pp, ep, etp, world_size (by default as many ranks as the others need), order, moe_order,
dispatcher, context; and moe.eval_capacity_factor, drop_policy, drop_scope: without them no token is dropped.

examples:
  moefold eval runs/quickstart --tokens held_out.npy --seq-len 256 --json
  moefold eval runs/quickstart --text README.md --seq-len 256 parallel.tp=2 parallel.ep=2
"""


def run(argv: list[str]) -> int:
    """Evaluate; returns the exit status."""
    arguments = _parser().parse_intermixed_args(argv)
    place = find_place()
    with one_voice(place):
        return _start(arguments, place)


def _start(arguments: argparse.Namespace, place: Place | None) -> int:
    from moefold.inference.settings import Wish, inference_config
    from moefold.inference.source import find_source

    if arguments.seq_len < 2:
        raise ConfigError(
            f"--seq-len {arguments.seq_len} must be at least 2: the first token of a sequence is not predicted"
        )
    if arguments.batch_size < 1:
        raise ConfigError(f"--batch-size {arguments.batch_size} must be at least 1")
    source = find_source(arguments.model)
    say_skipped(source.skipped, place)
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
        given = encode_text(source, open_tokenizer(source, arguments.tokenizer), text, name)
    ids = open_ids(given) if isinstance(given, Path) else given
    row = TokenRow(ids, arguments.seq_len, arguments.keep_tail)
    check_row(row, source.model.vocab_size, name)
    _check_space(arguments.logits, row, source.model.vocab_size)
    if cfg.moe.eval_capacity_factor <= 0:
        # Without a capacity, what fills a batch up changes nothing but the time it takes.
        batch_size = min(arguments.batch_size, -(-row.num_sequences // cfg.parallel.dp))
        cfg = inference_config(source, replace(wish, batch_size=batch_size), "evaluate")

    # torch takes seconds to import: everything above answers without it.
    from moefold.inference.rank import EvalJob, eval_rank
    from moefold.launch.ranks import choose_device, run_ranks

    job = EvalJob(
        source=source,
        cfg=cfg,
        ids=given,
        seq_len=arguments.seq_len,
        keeps_tail=arguments.keep_tail,
        logits=arguments.logits,
        as_json=arguments.json,
    )
    device_type = choose_device(cfg.run.device, cfg.parallel.world_size, place)
    return run_ranks(partial(eval_rank, job), cfg.parallel.world_size, device_type, place)


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
    parser = argparse.ArgumentParser(
        prog="moefold eval",
        description="Mean cross-entropy and perplexity of a model over a file. Starts the ranks itself on one\n"
        "machine; joins them under torchrun or srun.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", metavar="MODEL", help="checkpoint, run folder or Hugging Face folder")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="the mapping; see below")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--tokens", type=Path, metavar="FILE.npy", help="ids, one row of integers")
    source.add_argument("--text", type=Path, metavar="FILE", help="text in UTF-8, for the model's tokenizer")
    parser.add_argument("--seq-len", type=int, required=True, metavar="S", help="tokens of a sequence")
    parser.add_argument("--keep-tail", action="store_true", help="evaluate what is left at the end, as a shorter one")
    parser.add_argument(
        "--batch-size", type=int, default=8, metavar="N", help="sequences at once on each data-parallel rank (8)"
    )
    parser.add_argument("--logits", type=Path, metavar="OUT.npy", help="write float32 logits [sequences, S, V]")
    parser.add_argument("--tokenizer", default="", metavar="PATH", help="for --text: bytes or a tokenizer.json")
    add_compute_options(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object: loss, perplexity, tokens")
    return parser
