"""What a command says when the newest checkpoint of a run is not the one that it takes."""

import sys
from collections.abc import Sequence
from pathlib import Path

from moefold.checkpoint.folder import skipped_checkpoints
from moefold.launch.place import Place
from moefold.printable import print_escaped, printable


def say_skipped(skipped: Sequence[str], place: Place | None = None) -> None:
    """Name on stderr what was passed over; of the ranks of a launcher the first one does."""
    if place is None or place.rank == 0:
        for words in skipped:
            print_escaped(f"moefold: skipped a damaged checkpoint, {printable(words)}", file=sys.stderr)


def say_skipped_for(given: Path, found: Path) -> None:
    """As `say_skipped`, of a path that the user gave and what was found for it."""
    say_skipped(skipped_checkpoints(given, found))
