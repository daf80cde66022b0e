"""What import, export and upcycle share: the ranks of a launcher, the progress line, the summary."""

import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from moefold.errors import format_list
from moefold.host.rank_env import read_rank_env
from moefold.launch.runtime_env import return_large_blocks
from moefold.terminal import MULTILINE_CHARS, printable

if TYPE_CHECKING:
    from moefold.comm.groups import World
    from moefold.convert.import_folder import Conversion


@contextmanager
def conversion_job(label: str) -> Iterator[tuple["World", Callable[[int], None]]]:
    """Join the ranks that a launcher started, if it did, and show the bytes that go through this one.

    One of several ranks ends here, with status 0, when it is done.
    """
    place = read_rank_env()
    # torch takes seconds to import: a wrong environment is answered without it.
    from moefold.comm.groups import current_world
    from moefold.launch.exit import hard_exit
    from moefold.launch.failure import RankErrorHandler
    from moefold.launch.ranks import init_distributed

    with ExitStack() as stack:
        if place is not None and place.world_size > 1:
            stack.enter_context(RankErrorHandler(place, lambda: False))
            stack.enter_context(init_distributed(place, "cpu"))
        # What a job that repeats its steps would keep is used once here.
        return_large_blocks()
        crew = current_world()
        yield crew, stack.enter_context(_byte_progress(label, crew))
    if crew.size > 1:
        hard_exit(0)


def training_command(out: Path) -> str:
    """How to train from a checkpoint, for the shell."""
    return printable(f"train from it: moefold train {shlex.quote(str(out / 'recipe.toml'))}")


def conversion_summary(conversion: "Conversion", out: Path, was_checked: bool) -> str:
    """One line on what was written, and what was not, and one for each note."""
    checked = ", read again and equal" if was_checked else ""
    passed: dict[str, list[str]] = {}
    for name, reason in conversion.ignored.items():
        passed.setdefault(reason, []).append(name)
    over = "".join(f"; passed over ({reason}): {format_list(sorted(names))}" for reason, names in passed.items())
    size = f"{conversion.tensors} tensors, {conversion.num_bytes / 1e9:.3g} GB"
    notes = "".join(f"\nnote: {note}" for note in conversion.messages)
    return printable(
        f"{out}: {size}{checked}; {_other_files(len(conversion.sidecar_files))}{over}{notes}", MULTILINE_CHARS
    )


def _other_files(count: int) -> str:
    return "1 other file" if count == 1 else f"{count} other files"


@contextmanager
def _byte_progress(label: str, world: "World") -> Iterator[Callable[[int], None]]:
    if not world.is_rank0 or not sys.stdout.isatty():
        yield lambda _: None
        return
    from rich.progress import DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    with Progress(TextColumn(label), DownloadColumn(), TransferSpeedColumn(), transient=True) as bar:
        task = bar.add_task(label, total=None)
        yield lambda count: bar.advance(task, count)
