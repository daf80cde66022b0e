"""Options of every command that computes with a finished model.

What a command says when the newest checkpoint of a run is not the one that it takes.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from moefold.checkpoint.checkpoint_dir import skipped_checkpoints
from moefold.host.rank_env import RankEnv
from moefold.terminal import print_escaped, printable


def add_inference_options(parser: argparse.ArgumentParser) -> None:
    """Add what evaluation and generation have in common."""
    parser.add_argument(
        "--dtype", default="auto", help="float32, bfloat16, float64, or auto: the type of the stored weights (auto)"
    )
    parser.add_argument("--device", default="auto", help="cpu, cuda, or auto: cuda where there is one (auto)")


def report_skipped(skipped: Sequence[str], rank_env: RankEnv | None = None) -> None:
    """Name on stderr what was passed over; of the ranks of a launcher the first one does."""
    if rank_env is None or rank_env.rank == 0:
        for words in skipped:
            print_escaped(f"moefold: skipped a damaged checkpoint, {printable(words)}", file=sys.stderr)


def report_skipped_for(requested: Path, found: Path) -> None:
    """As `report_skipped`, of a path that the user gave and what was found for it."""
    report_skipped(skipped_checkpoints(requested, found))
