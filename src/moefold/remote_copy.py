"""Copies of remote files in this machine's cache, for files that are memory-mapped or read by name.

A copy has the size and the time of its original, and is fetched again if either differs. Its path is
`CACHE/remote/SCHEME/BUCKET/KEY`, so a folder and the files below it share their copies.
"""

import fnmatch
import os
import uuid
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from moefold.cache_dir import cache_folders
from moefold.errors import ConfigError
from moefold.file_lock import hold_lock
from moefold.folder_files import list_files
from moefold.remote_path import RemoteEntry, RemotePath

CACHE_SUBFOLDER = "remote"


@cache
def local_copy(url: str, patterns: tuple[str, ...] = ()) -> Path:
    """Copy a remote file or folder into the cache, and return its path there.

    With patterns, only files of the folder with matching names are copied. A process queries the remote side once.
    Later calls return the same copy. Files that no longer exist there are deleted from the copy. Processes of this
    machine wait for each other.

    Raises:
        ConfigError: there is nothing at this URL, it cannot be read, or the cache cannot be written.
    """
    remote = RemotePath(url)
    target = _copy_path(remote)
    try:
        is_file = remote.is_file()
        files = {"": _file_entry(remote)} if is_file else remote.files()
    except FileNotFoundError:
        files = {}
    if not files:
        raise ConfigError(f"{url!r} does not exist, or is an empty folder; name a file or a folder with files")
    for name in files:
        # Keys of a store are arbitrary text: "folder//etc/x" would be an absolute path here.
        if name.startswith("/") or ".." in Path(name).parts:
            raise ConfigError(f"{url!r} has a file {name!r}, whose name leads out of the folder; rename it")
    try:
        with _lock(target):
            _delete_others(target, files)
            for name, entry in files.items():
                if not patterns or any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns):
                    _copy_file(remote, target, entry)
    except ConfigError:
        raise
    except OSError as error:
        raise ConfigError(
            f"the copy of {url!r} in {str(target)!r} cannot be written: {error.strerror or error}; free disk space, or "
            "set XDG_CACHE_HOME to a folder of a larger disk"
        ) from error
    return target


def upload_folder(source: Path, target: RemotePath, *, last: Sequence[str]) -> None:
    """Send the files of a folder, the files named in `last` after all others.

    Raises:
        ConfigError: a file is a link out of the folder. Nothing is sent.
        RemoteError: a file cannot be sent. Sent files stay, without the files in `last`.
    """
    files = list_files(source)
    for name in sorted(files, key=lambda name: name in last):
        (target / name).upload(files[name])


def _file_entry(remote: RemotePath) -> RemoteEntry:
    status = remote.stat()
    return RemoteEntry("", False, status.st_size, status.st_mtime)


def _copy_path(remote: RemotePath) -> Path:
    """Return the path of the copy of a remote path, in the first cache folder that can be created."""
    names = [name for name in remote.parts[1:] if name not in ("", ".")]
    if ".." in names:
        raise ConfigError(f"{str(remote)!r} has '..' in its path; name it without")
    for folder in cache_folders(None):
        root = folder / CACHE_SUBFOLDER
        try:
            root.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError:
            continue
        if os.access(root, os.W_OK):
            return root.joinpath(remote.scheme, *names)
    raise ConfigError(f"{str(remote)!r} needs a cache folder, and none can be written; set XDG_CACHE_HOME")


@contextmanager
def _lock(target: Path) -> Iterator[None]:
    """Hold the lock of a copy. Its file is in the scheme's folder, because the copy of a parent covers this copy."""
    root = next(parent for parent in target.parents if parent.name == CACHE_SUBFOLDER)
    with hold_lock(root / ".lock"):
        yield


def _delete_others(target: Path, files: Collection[str]) -> None:
    """Delete the copies of files that no longer exist."""
    wanted_paths = {target / name for name in files if name}
    for path in target.rglob("*") if target.is_dir() else ():
        if path.is_file() and path not in wanted_paths:
            path.unlink()


def _copy_file(remote: RemotePath, target: Path, entry: RemoteEntry) -> None:
    path = target / entry.name if entry.name else target
    if not _is_current(path, entry):
        _fetch(remote / entry.name if entry.name else remote, path, entry)


def _is_current(path: Path, entry: RemoteEntry) -> bool:
    try:
        status = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return status.st_size == entry.size_bytes and abs(status.st_mtime - entry.modified_s) < 1e-3


def _fetch(remote: RemotePath, path: Path, entry: RemoteEntry) -> None:
    """Copy one file under another name, give it the original's time, and rename it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{uuid.uuid4().hex}.partial")
    try:
        remote.download(draft)
        if draft.stat().st_size != entry.size_bytes:
            raise ConfigError(f"{str(remote)!r} changed while it was copied; start again once it is complete")
        os.utime(draft, (entry.modified_s, entry.modified_s))
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
