"""What a command says when the newest checkpoint of a run is not the one that it takes."""

import sys
from collections.abc import Sequence
from pathlib import Path

from moefold.checkpoint.folder import skipped_checkpoints
from moefold.launch.place import RankEnv
from moefold.printable import print_escaped, printable


def report_skipped(skipped: Sequence[str], rank_env: RankEnv | None = None) -> None:
    """Name on stderr what was passed over; of the ranks of a launcher the first one does."""
    if rank_env is None or rank_env.rank == 0:
        for words in skipped:
            print_escaped(f"moefold: skipped a damaged checkpoint, {printable(words)}", file=sys.stderr)


def report_skipped_for(requested: Path, found: Path) -> None:
    """As `report_skipped`, of a path that the user gave and what was found for it."""
    report_skipped(skipped_checkpoints(requested, found))
