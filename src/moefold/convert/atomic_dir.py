"""A folder that is complete or absent: written under another name, renamed once every process is done.

Whether a folder can be made. Torch-free.
"""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from moefold.comm.groups import World
from moefold.errors import ConfigError


@contextmanager
def atomic_directory(final: Path, world: World) -> Iterator[Path]:
    """Inside, a folder to write into, the same for all processes. It gets its name at the end, or is removed.

    Collective: every process enters and leaves. One that fails removes the folder, with the parents that were made for
    it, and ends the job.

    Raises:
        ConfigError: `final` exists, or the disk refuses to hold it.
    """
    raise_on_all_ranks(world, new_folder_unsupported_reason(final) if world.is_rank0 else "")
    draft = final.absolute().with_name(f".{final.absolute().name}.partial")
    # Of the first process, for all: another one may see the parents made already.
    parents: list[Path] = world.all_gather_object(_missing_parents(draft))[0]
    try:
        raise_on_all_ranks(world, _create_tmp_dir(final, draft) if world.is_rank0 else "")
        yield draft
        raise_on_all_ranks(world, "")
        if world.is_rank0:
            draft.rename(final)
    except BaseException as error:
        # No word to the others: they may be in the middle of anything. The launcher ends them.
        shutil.rmtree(draft, ignore_errors=True)
        for parent in parents:
            with suppress(OSError):
                parent.rmdir()
        if isinstance(error, OSError):
            raise ConfigError(f"{str(final)!r} cannot be written: {error.strerror or error}") from error
        raise
    raise_on_all_ranks(world, "")


def raise_on_all_ranks(world: World, reason: str) -> None:
    """Raise the fault of any process on all of them; collective.

    Raises:
        ConfigError: a process brought a fault.
    """
    faults = [found for found in world.all_gather_object(reason) if found]
    if faults:
        raise ConfigError(faults[0])


def _missing_parents(path: Path) -> list[Path]:
    """Those that do not exist yet, the deepest first."""
    return [parent for parent in path.parents if not parent.exists()]


def _create_tmp_dir(final: Path, tmp_dir: Path) -> str:
    try:
        shutil.rmtree(tmp_dir, ignore_errors=True)
        tmp_dir.mkdir(parents=True)
    except OSError as error:
        return f"{str(final)!r} cannot be written: {error.strerror}"
    return ""


def new_folder_unsupported_reason(final: Path) -> str:
    """Return why a folder cannot get a name, or ""."""
    try:
        if final.exists() or final.is_symlink():
            return f"{str(final)!r} exists; name another folder, or remove it"
    except (OSError, ValueError) as error:
        return f"{str(final)!r} cannot be written: {getattr(error, 'strerror', None) or error}"
    return "" if final.name not in ("", "..") else f"{str(final)!r} is no name of a new folder"
