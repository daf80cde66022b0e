"""Functions that import, export and upcycle share: joining the ranks of a launcher, progress bar and summary."""

import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from moefold.host.rank_env import read_rank_env
from moefold.message_text import format_list
from moefold.progress import ReadProgress
from moefold.remote_path import is_remote
from moefold.terminal import MULTILINE_CHARS, printable

if TYPE_CHECKING:
    from moefold.comm.groups import World
    from moefold.convert.import_folder import Conversion


@contextmanager
def conversion_job(label: str) -> Iterator[tuple["World", Callable[[int], None]]]:
    """Join the ranks that a launcher started, if any, and yield the world and a progress callback for bytes.

    With several ranks, the process exits with status 0 at the end of the context.
    """
    rank_env = read_rank_env()
    # torch takes seconds to import: errors in the environment are reported without it.
    from moefold.comm.groups import current_world
    from moefold.launch.exit import hard_exit
    from moefold.launch.rank_errors import RankErrorHandler
    from moefold.launch.ranks import init_distributed
    from moefold.launch.threads_and_malloc import return_large_blocks

    with ExitStack() as stack:
        if rank_env is not None and rank_env.world_size > 1:
            stack.enter_context(RankErrorHandler(rank_env, lambda: False))
            stack.enter_context(init_distributed(rank_env, "cpu"))
        # A conversion uses each buffer once, so freed blocks go back to the system, not to malloc's cache.
        return_large_blocks()
        world = current_world()
        is_shown = world.is_rank0 and sys.stderr.isatty()
        yield world, stack.enter_context(ReadProgress(label, None, is_shown=is_shown)).advance
    if world.size > 1:
        hard_exit(0)


def training_command(out: Path) -> str:
    """Return the shell command that trains from a checkpoint."""
    if is_remote(out):
        return printable(f"train from it: moefold train RECIPE checkpoint.init_from={shlex.quote(str(out))}")
    return printable(f"train from it: moefold train {shlex.quote(str(out / 'recipe.toml'))}")


def conversion_summary(conversion: "Conversion", out: Path, was_checked: bool) -> str:
    """Return one line about the written and ignored tensors, and one line for each note."""
    checked = ", read again and equal" if was_checked else ""
    names_by_reason: dict[str, list[str]] = {}
    for name, reason in conversion.ignored.items():
        names_by_reason.setdefault(reason, []).append(name)
    ignored = "".join(
        f"; ignored ({reason}): {format_list(sorted(names))}" for reason, names in names_by_reason.items()
    )
    size = f"{conversion.tensors} tensors, {conversion.num_bytes / 1e9:.3g} GB"
    notes = "".join(f"\nnote: {note}" for note in conversion.messages)
    count = len(conversion.sidecar_files)
    other_files = "1 other file" if count == 1 else f"{count} other files"
    return printable(f"{out}: {size}{checked}; {other_files}{ignored}{notes}", MULTILINE_CHARS)
