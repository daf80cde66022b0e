"""Notes on a model on stderr, of commands and programs."""

import sys
from collections.abc import Sequence

from moefold.host.rank_env import RankEnv
from moefold.terminal import print_escaped, printable


def report_notices(notices: Sequence[str], rank_env: RankEnv | None = None) -> None:
    """Report notes on a model on stderr, on rank 0 only."""
    if rank_env is None or rank_env.rank == 0:
        for notice in notices:
            print_escaped(f"moefold: {printable(notice)}", file=sys.stderr)
