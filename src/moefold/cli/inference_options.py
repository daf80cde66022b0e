"""Options of every command that runs a finished model, and the notice about skipped checkpoints."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from moefold.checkpoint.checkpoint_dir import skipped_checkpoints
from moefold.host.rank_env import RankEnv
from moefold.terminal import print_escaped, printable


def add_inference_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that evaluation and generation share."""
    parser.add_argument(
        "--dtype", default="auto", help="float32, bfloat16, float64, or auto: the dtype of the stored weights (auto)"
    )
    parser.add_argument("--device", default="auto", help="cpu, cuda, or auto: cuda if available (auto)")


def add_experts_option(parser: argparse.ArgumentParser) -> None:
    """Add the option of commands that generate under data parallelism."""
    parser.add_argument(
        "--experts",
        choices=("exchange", "fetch"),
        default="exchange",
        help="how data-parallel ranks reach experts of other ranks: exchange tokens in step, or fetch: read the "
        "weights of their peers from shared memory (exchange)",
    )


def report_skipped(skipped: Sequence[str], rank_env: RankEnv | None = None) -> None:
    """Report skipped checkpoints on stderr, on rank 0 only."""
    if rank_env is None or rank_env.rank == 0:
        for description in skipped:
            print_escaped(f"moefold: skipped a damaged checkpoint, {printable(description)}", file=sys.stderr)


def report_skipped_for(requested: Path, found: Path) -> None:
    """Report the checkpoints skipped between the path that the user gave and the checkpoint found for it."""
    report_skipped(skipped_checkpoints(requested, found))
