"""Atomic creation of a folder: it is written under a temporary name and renamed once every process is done.

A remote folder is first written on this machine. It is sent once it is complete, its marker file last.
"""

import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from moefold.cache_dir import cache_folders
from moefold.comm.groups import World, raise_on_all_ranks
from moefold.convert.preflight import new_folder_unsupported_reason
from moefold.errors import ConfigError
from moefold.file_lock import FileLock, is_locked
from moefold.remote_copy import upload_folder
from moefold.remote_path import RemotePath

MARKER_FILES = ("config.json", "manifest.json")
"""Files that mark a folder as a Hugging Face folder or checkpoint. They are sent last."""


@contextmanager
def atomic_directory(final: Path, world: World) -> Iterator[Path]:
    """Yield a temporary folder, the same on all processes, and rename it to `final` at the end.

    Collective: every process enters and leaves. If a process fails, it removes the folder and the parents created for
    it, and ends the job.

    Raises:
        ConfigError: `final` exists, or cannot be written.
    """
    raise_on_all_ranks(world, new_folder_unsupported_reason(final) if world.is_rank0 else "")
    tmp_dir = _temporary_path(final, world)
    # The list of rank 0, because another process may see parents that were created in the meantime.
    parents: list[Path] = world.all_gather_object([path for path in tmp_dir.parents if not path.exists()])[0]
    text = f"{str(final)!r} is being written by another command; wait for it, or name another folder"
    raise_on_all_ranks(world, text if world.is_rank0 and is_locked(tmp_dir) else "")
    lock: FileLock | None = None
    try:
        raise_on_all_ranks(world, _create_tmp_dir(final, tmp_dir) if world.is_rank0 else "")
        lock = _lock_folder(tmp_dir) if world.is_rank0 else None
        yield tmp_dir
        raise_on_all_ranks(world, "")
        if world.is_rank0 and isinstance(final, RemotePath):
            upload_folder(tmp_dir, final, last=MARKER_FILES)
            shutil.rmtree(tmp_dir)
        elif world.is_rank0:
            tmp_dir.rename(final)
    except BaseException as error:
        # No collective here: the other processes may be anywhere in their code, and the launcher ends them.
        shutil.rmtree(tmp_dir, ignore_errors=True)
        for parent in parents:
            with suppress(OSError):
                parent.rmdir()
        if isinstance(error, OSError) and not isinstance(error, ConfigError):
            raise ConfigError(f"{str(final)!r} cannot be written: {error.strerror or error}") from error
        raise
    finally:
        if lock is not None:
            lock.close()
    raise_on_all_ranks(world, "")


def _temporary_path(final: Path, world: World) -> Path:
    """Return the temporary folder: next to the final folder, or in this machine's cache for a remote folder."""
    if not isinstance(final, RemotePath):
        return final.absolute().with_name(f".{final.absolute().name}.partial")
    name = f"{final.name}-{uuid.uuid4().hex[:12]}"
    path: Path = world.all_gather_object(cache_folders(None)[0] / "upload" / name)[0]
    return path


def _lock_folder(tmp_dir: Path) -> FileLock | None:
    """Lock a new folder until it is complete, so that another command does not remove it. Return None on NFS."""
    lock = FileLock(os.open(tmp_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
    try:
        lock.try_acquire()
    except OSError:
        lock.close()
        return None
    return lock


def _create_tmp_dir(final: Path, tmp_dir: Path) -> str:
    try:
        shutil.rmtree(tmp_dir, ignore_errors=True)
        tmp_dir.mkdir(parents=True)
    except OSError as error:
        return f"{str(final)!r} cannot be written: {error.strerror}"
    return ""
