"""`moefold eval`: mean cross-entropy of a model over a file of tokens or text."""

import argparse
import shutil
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from moefold.cli.command_parser import (
    DEVICE_OPTION,
    TOKENIZER_OPTION,
    CommandParser,
    report_on_local_rank0,
    reworded_errors,
)
from moefold.cli.inference_options import add_inference_options, report_skipped
from moefold.errors import ConfigError
from moefold.host.rank_env import RankEnv, check_world_size, read_rank_env
from moefold.planner.export_recipe import check_writable, reject_existing
from moefold.terminal import print_escaped

if TYPE_CHECKING:
    from moefold.inference.source import ModelSource
    from moefold.inference.token_dataset import TokenDataset

EPILOG = """MODEL is a checkpoint (RUN_DIR/checkpoints/step-000100), a folder of checkpoints or a run folder, of which
the newest complete one is taken, or a Hugging Face folder. The file is split into consecutive sequences of S tokens,
and every token but the first of each is predicted. Tokens after the last whole sequence are left out, unless
--keep-tail is given. Without --seq-len, S is train.seq_len of the run, or, for a Hugging Face folder, its
max_position_embeddings, but at most 2048; stderr reports it.

Overrides are parallel.tp, cp, pp, ep, etp, world_size (by default as many ranks as the others need), order, moe_order,
dispatcher, context; and moe.eval_capacity_factor, drop_policy, drop_scope: without them no token is dropped.

examples:
  moefold eval runs/quickstart --tokens held_out.npy --seq-len 256 --json
  moefold eval runs/quickstart --text README.md parallel.tp=2 parallel.ep=2
"""


MAX_DEFAULT_SEQ_LEN = 2048
"""Many models support 128 k tokens and more, which few machines and texts can fill."""


def run(argv: list[str]) -> int:
    """Run `moefold eval` and return the exit status."""
    arguments = _parser().parse_intermixed_args(argv)
    rank_env = read_rank_env()
    with report_on_local_rank0(rank_env):
        return _evaluate(arguments, rank_env)


def _evaluate(arguments: argparse.Namespace, rank_env: RankEnv | None) -> int:
    from moefold.checkpoint.checkpoint_dir import check_file_sizes
    from moefold.inference.settings import EVAL_OOM_HINT, InferenceRequest, batch_bytes, inference_config
    from moefold.inference.source import find_source
    from moefold.launch.fitting import check_inference, choose_checked_device

    if arguments.seq_len is not None and arguments.seq_len < 2:
        raise ConfigError(
            f"--seq-len {arguments.seq_len} must be at least 2: the first token of a sequence is not predicted"
        )
    if arguments.batch_size < 1:
        raise ConfigError(f"--batch-size {arguments.batch_size} must be at least 1")
    source = find_source(arguments.model)
    report_skipped(source.skipped, rank_env)
    if arguments.seq_len is None:
        arguments.seq_len = _default_seq_len(source, rank_env)
    request = InferenceRequest(
        overrides=tuple(arguments.overrides),
        dtype=arguments.dtype,
        device=arguments.device,
        world_size=None if rank_env is None else rank_env.world_size,
        seq_len=arguments.seq_len,
        batch_size=arguments.batch_size,
    )
    cfg = inference_config(source, request, "evaluate")
    if rank_env is not None:
        check_world_size(rank_env, cfg.parallel.world_size)
    _check_logits(arguments)

    from moefold.inference.text import encode_text, open_tokenizer, read_text
    from moefold.inference.token_dataset import TokenDataset, check_dataset, open_ids

    if arguments.tokens is not None:
        name = f"--tokens {str(arguments.tokens)!r}"
        given = arguments.tokens
    else:
        name = f"--text {str(arguments.text)!r}"
        text = read_text(arguments.text, "--text")
        with reworded_errors(*(TOKENIZER_OPTION if arguments.tokenizer else ())):
            given = encode_text(source, open_tokenizer(source, arguments.tokenizer), text, name)
    ids = open_ids(given) if isinstance(given, Path) else given
    dataset = TokenDataset(ids, arguments.seq_len, arguments.keep_tail)
    check_dataset(dataset, source.model.vocab_size, name)
    _check_disk_space(arguments.logits, dataset, source.model.vocab_size)
    if cfg.moe.eval_capacity_factor <= 0:
        # Without a capacity, padding sequences cost time but do not change the result: shrink the batch.
        batch_size = min(arguments.batch_size, -(-dataset.num_sequences // cfg.parallel.dp))
        cfg = inference_config(source, replace(request, batch_size=batch_size), "evaluate")

    batch = f"a batch of {cfg.train.micro_batch_size} sequences of {cfg.train.seq_len} tokens"
    check = partial(
        check_inference, cfg, rank_env=rank_env, extra_bytes={batch: batch_bytes(cfg)}, suggestion=EVAL_OOM_HINT
    )
    with reworded_errors(*DEVICE_OPTION):
        device_type = choose_checked_device(cfg.run.device, cfg.parallel.world_size, rank_env, check)
    if source.kind == "checkpoint":
        check_file_sizes(source.path)

    # torch takes seconds to import: without a GPU, every error above is reported without it.
    from moefold.inference.worker import EvalJob, eval_worker
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
    return run_ranks(partial(eval_worker, job), cfg.parallel.world_size, device_type, rank_env)


def _default_seq_len(source: "ModelSource", rank_env: RankEnv | None) -> int:
    """Return train.seq_len of the run, or else the model's context length up to a bound; report it on stderr."""
    if source.trained_len:
        seq_len = source.trained_len
        origin = "train.seq_len of the run"
    else:
        seq_len = min(source.context, MAX_DEFAULT_SEQ_LEN)
        origin = f"the context length of the model, {source.context}, up to {MAX_DEFAULT_SEQ_LEN}"
    if rank_env is None or rank_env.rank == 0:
        print_escaped(f"--seq-len {seq_len}: {origin}", file=sys.stderr)
    return seq_len


def _check_logits(arguments: argparse.Namespace) -> None:
    path = arguments.logits
    if path is None:
        return
    if arguments.keep_tail:
        raise ConfigError("--logits writes whole sequences only, and --keep-tail adds a shorter one; leave one out")
    if path.suffix != ".npy":
        raise ConfigError(f"--logits {str(path)!r} must end in .npy, the file format")
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"--logits {str(path)!r}: the folder {str(path.absolute().parent)!r} does not exist")
    if path.is_dir():
        raise ConfigError(f"--logits {str(path)!r} is a folder; name a file in it: {str(path / 'logits.npy')!r}")
    source_file = arguments.tokens if arguments.tokens is not None else arguments.text
    if path.resolve() == source_file.resolve():
        raise ConfigError(f"--logits {str(path)!r} would replace the file that is evaluated; name another one")
    reject_existing("--logits", path, force=arguments.force)
    check_writable("--logits", path)


def _check_disk_space(path: Path | None, dataset: "TokenDataset", vocab_size: int) -> None:
    """Reject logits that do not fit on the disk: running out of space in a memory-mapped file kills the process."""
    if path is None:
        return
    needed_bytes = 4 * dataset.num_sequences * dataset.seq_len * vocab_size
    free_bytes = shutil.disk_usage(path.absolute().parent).free
    if needed_bytes > free_bytes:
        raise ConfigError(
            f"--logits {str(path)!r} takes {needed_bytes / 1e9:,.1f} GB, and {free_bytes / 1e9:,.1f} GB are free; "
            "name a file on another disk, or evaluate less"
        )


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="moefold eval",
        description="Compute mean cross-entropy and perplexity of a model over a file. Starts the ranks itself on one\n"
        "machine; joins them under torchrun or srun.",
        epilog=EPILOG,
    )
    parser.add_argument("model", metavar="MODEL", help="checkpoint, run folder or Hugging Face folder")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="the mapping; see below")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--tokens", type=Path, metavar="FILE.npy", help="ids, one row of integers")
    source.add_argument("--text", type=Path, metavar="FILE", help="text in UTF-8, for the model's tokenizer")
    parser.add_argument("--seq-len", type=int, metavar="S", help="tokens per sequence (default: see above)")
    parser.add_argument("--keep-tail", action="store_true", help="evaluate the remaining tokens as a shorter sequence")
    parser.add_argument(
        "--batch-size", type=int, default=8, metavar="N", help="sequences at once on each data-parallel rank (8)"
    )
    parser.add_argument("--logits", type=Path, metavar="OUT.npy", help="write float32 logits [sequences, S, V]")
    parser.add_argument("--force", action="store_true", help="replace the file of --logits if it exists")
    parser.add_argument("--tokenizer", default="", metavar="PATH", help="for --text: bytes or a tokenizer.json")
    add_inference_options(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object: loss, perplexity, tokens")
    return parser
