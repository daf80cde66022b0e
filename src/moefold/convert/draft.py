"""A folder that is complete or absent: written under another name, renamed once every process is done."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from moefold.errors import ConfigError
from moefold.launch.crew import Crew


@contextmanager
def drafted(final: Path, crew: Crew) -> Iterator[Path]:
    """Inside, a folder to write into, the same for all processes. It gets its name at the end, or is removed.

    Collective: every process enters and leaves. One that fails removes the folder and ends the job.

    Raises:
        ConfigError: `final` exists, or cannot be made.
    """
    draft = final.absolute().with_name(f".{final.absolute().name}.partial")
    agree(crew, _begin(final, draft) if crew.is_first else "")
    try:
        yield draft
        agree(crew, "")
    except BaseException:
        # No word to the others: they may be in the middle of anything. The launcher ends them.
        shutil.rmtree(draft, ignore_errors=True)
        raise
    if crew.is_first:
        draft.rename(final)
    agree(crew, "")


def agree(crew: Crew, fault: str) -> None:
    """Raise the fault of any process on all of them; collective.

    Raises:
        ConfigError: a process brought a fault.
    """
    faults = [found for found in crew.gather(fault) if found]
    if faults:
        raise ConfigError(faults[0])


def _begin(final: Path, draft: Path) -> str:
    if final.exists() or final.is_symlink():
        return f"{str(final)!r} exists; name another folder, or remove it"
    try:
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
    except OSError as error:
        return f"{str(final)!r} cannot be written: {error.strerror}"
    return ""
