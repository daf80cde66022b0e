"""What import, export and upcycle share: the ranks of a launcher, the progress line, the summary."""

import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from moefold.errors import some
from moefold.launch.heap import return_large_blocks
from moefold.launch.place import find_place
from moefold.printable import LINES, printable

if TYPE_CHECKING:
    from moefold.convert.import_folder import Conversion
    from moefold.launch.crew import Crew


@contextmanager
def conversion_job(what: str) -> Iterator[tuple["Crew", Callable[[int], None]]]:
    """Join the ranks that a launcher started, if it did, and show the bytes that go through this one.

    One of several ranks ends here, with status 0, when it is done.
    """
    place = find_place()
    # torch takes seconds to import: a wrong environment is answered without it.
    from moefold.launch.crew import joined_crew
    from moefold.launch.departure import leave
    from moefold.launch.failure import FailingRank
    from moefold.launch.ranks import joined

    with ExitStack() as stack:
        if place is not None and place.world_size > 1:
            stack.enter_context(FailingRank(place, lambda: False))
            stack.enter_context(joined(place, "cpu"))
        # What a job that repeats its steps would keep is used once here.
        return_large_blocks()
        crew = joined_crew()
        yield crew, stack.enter_context(_progress(what, crew))
    if crew.size > 1:
        leave(0)


def training_command(out: Path) -> str:
    """How to train from a checkpoint, for the shell."""
    return printable(f"train from it: moefold train {shlex.quote(str(out / 'recipe.toml'))}")


def conversion_summary(done: "Conversion", out: Path, was_checked: bool) -> str:
    """One line on what was written, and what was not, and one for each note."""
    checked = ", read again and equal" if was_checked else ""
    passed: dict[str, list[str]] = {}
    for name, reason in done.passed_over.items():
        passed.setdefault(reason, []).append(name)
    over = "".join(f"; passed over ({reason}): {some(sorted(names))}" for reason, names in passed.items())
    size = f"{done.tensors} tensors, {done.num_bytes / 1e9:.3g} GB"
    notes = "".join(f"\nnote: {note}" for note in done.notes)
    return printable(f"{out}: {size}{checked}; {_other_files(len(done.companions))}{over}{notes}", LINES)


def _other_files(count: int) -> str:
    return "1 other file" if count == 1 else f"{count} other files"


@contextmanager
def _progress(what: str, crew: "Crew") -> Iterator[Callable[[int], None]]:
    if not crew.is_first or not sys.stdout.isatty():
        yield lambda _: None
        return
    from rich.progress import DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    with Progress(TextColumn(what), DownloadColumn(), TransferSpeedColumn(), transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda count: bar.advance(task, count)
