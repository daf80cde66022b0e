"""Paths of remote files with one of the `PROTOCOLS`, such as `s3://`: literal names, methods of `pathlib.Path`.

A `RemotePath` is a `Path` whose operations go through fsspec. Functions that need a local file (`open`, `os.*`,
`shutil.*`, memory mapping) raise TypeError for it, so that no local folder of that name is created by mistake.
"""

import errno
import fnmatch
import os
import re
import stat
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from io import SEEK_SET, BufferedReader, RawIOBase
from pathlib import Path, PosixPath
from typing import Any, NoReturn

from moefold.errors import ConfigError, install_command

_URL = re.compile(r"[a-z][a-z0-9+.-]*://", re.IGNORECASE)
HUB_SCHEME = "hf://"
"""Prefix of a name on the Hugging Face hub, see `hub`."""
OBJECT_STORES = frozenset({"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "oss", "oci"})
"""Protocols of stores without folders: a key may contain slashes, and no folder is created before a file."""
_ABSOLUTE_SCHEMES = frozenset({"file", "local"})
_HOSTLESS_SCHEMES = _ABSOLUTE_SCHEMES | {"memory"}
PROTOCOLS = OBJECT_STORES | _ABSOLUTE_SCHEMES | {"memory", "hdfs", "webhdfs", "sftp", "http", "https"}
"""Protocols that may be used. fsspec has other protocols that read an archive, a cache or a program's output, start a
shell, or fill in templates. It chains protocols by `::`, which is plain text here."""
_PACKAGES = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "az": "adlfs", "abfs": "adlfs"}
_MAX_REASON_CHARS = 300
_READ_BUFFER_BYTES = 1 << 17
"""Size of a request for a small part of a file. A larger part is read by one request of its own size."""
_S3_ADVICE = (
    "check the name of the bucket, the credentials (AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY) and, "
    "for another store than Amazon's, AWS_ENDPOINT_URL"
)
_GS_ADVICE = "check the name of the bucket and the credentials (GOOGLE_APPLICATION_CREDENTIALS)"
_ADVICE = {"s3": _S3_ADVICE, "s3a": _S3_ADVICE, "gs": _GS_ADVICE, "gcs": _GS_ADVICE}


def is_remote(name: str | Path) -> bool:
    """Return whether a name is a URL rather than a path of this machine."""
    return isinstance(name, RemotePath) or (isinstance(name, str) and _URL.match(name) is not None)


def to_path(name: str) -> Path:
    """Return the path of a local or remote name.

    Raises:
        ConfigError: the name is on the Hugging Face hub, where files cannot be written or listed like in a folder.
    """
    if name.startswith(HUB_SCHEME):
        raise ConfigError(f"{name!r} is a model or a data set on the Hugging Face hub; name a folder here")
    return RemotePath(name) if is_remote(name) else Path(name)


class RemoteError(OSError, ConfigError):
    """Failed request to a remote file system: an I/O error whose message to the user has the way out."""

    def __str__(self) -> str:
        """Return the message in one line."""
        advice = _ADVICE.get(str(self.filename).partition("://")[0], "check the name and the network")
        return f"{self.filename!r} cannot be used: {self.strerror}; {advice}"


@dataclass(frozen=True)
class RemoteEntry:
    """One file or folder in a listing."""

    name: str
    is_dir: bool
    size_bytes: int
    modified_s: float
    """Time of the last change, seconds since 1970, or 0 if the store has no times."""


class RemotePath(PosixPath):
    """Path of a file or a folder of a remote file system.

    `str()` is the URL. Every operation is a request without a cache, and may be called from any thread or process.
    """

    def __str__(self) -> str:
        scheme = self.parts[0].removesuffix(":")
        root = "/" if scheme in _ABSOLUTE_SCHEMES else ""
        return f"{scheme}://{root}{'/'.join(self.parts[1:])}"

    def __fspath__(self) -> NoReturn:
        raise TypeError(f"{str(self)!r} is not a file of this machine")

    @property
    def scheme(self) -> str:
        """Return the protocol, such as "s3"."""
        return self.parts[0].removesuffix(":")

    def _open_filesystem(self) -> tuple[Any, str]:
        """Return the file system, with an empty cache of listings, and the key of this path.

        The whole name is the key: "::" does not chain file systems.

        Raises:
            ConfigError: the protocol is not in `PROTOCOLS`, its package is not installed, or it cannot connect.
        """
        if self.scheme not in PROTOCOLS:
            raise ConfigError(
                f"{str(self)!r} has the protocol {self.scheme!r}, which is none of {', '.join(sorted(PROTOCOLS))}; "
                "use one of them, or a path"
            )
        if self.scheme not in _HOSTLESS_SCHEMES and "::" in "".join(self.parts[1:2]):
            raise ConfigError(f"{str(self)!r} has '::' in the name of its server or bucket; write one address")
        try:
            from fsspec.core import strip_protocol, url_to_fs

            # `url_to_fs` would split a key with `::`, so it only gets the address of the server.
            host = "" if self.scheme in _HOSTLESS_SCHEMES else "".join(self.parts[1:2])
            filesystem = url_to_fs(f"{self.scheme}://{host}/")[0]
            key = str(strip_protocol(str(self)))
        except ImportError as error:
            package = _PACKAGES.get(self.scheme)
            way_out = f"pip install {package}, or the extra: {install_command('remote')}" if package else str(error)
            raise ConfigError(f"{str(self)!r} needs a package that is not installed: {way_out}") from None
        except Exception as error:
            # Some file systems connect here, each with its own error classes.
            raise RemoteError(errno.EIO, _reason(error), str(self)) from error
        filesystem.invalidate_cache()
        return filesystem, key

    @contextmanager
    def _requests(self) -> Iterator[tuple[Any, str]]:
        """Yield the file system and the key of this path. Turn errors of its library into OSError.

        Raises:
            OSError: the operation failed. `strerror` is the reason in one line.
        """
        filesystem, key = self._open_filesystem()
        try:
            yield filesystem, key
        except FileNotFoundError:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self)) from None
        except Exception as error:
            raise _translated(error, self) from error

    def entries(self) -> list[RemoteEntry]:
        """List a folder, by name.

        Raises:
            FileNotFoundError: no key begins with this path.
            OSError: the folder cannot be listed.
        """
        with self._requests() as (filesystem, key):
            infos = filesystem.ls(key, detail=True)
        records = []
        for info in infos:
            name = str(info["name"]).rstrip("/").rpartition("/")[2]
            # A store may list the folder itself, as an empty object, or a file as its only entry.
            if str(info["name"]).rstrip("/").lstrip("/") == key.rstrip("/").lstrip("/"):
                continue
            records.append(_entry(name, info))
        return sorted(records, key=lambda entry: entry.name)

    def files(self) -> dict[str, RemoteEntry]:
        """Return all files below a folder by their relative names, or the file itself under its own name.

        Raises:
            OSError: the files cannot be listed.
        """
        with self._requests() as (filesystem, key):
            infos = filesystem.find(key, detail=True)
        base = key.strip("/") + "/"
        entries = {}
        for name, info in infos.items():
            path = str(name).lstrip("/")
            relative = path.removeprefix(base) if path.startswith(base) else path.rpartition("/")[2]
            if not relative.endswith("/"):
                entries[relative] = _entry(relative, info)
        return dict(sorted(entries.items()))

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        """Return kind, size and time of the last change. Folders have no time.

        Raises:
            FileNotFoundError: the path does not exist.
            OSError: the server cannot be reached.
        """
        with self._requests() as (filesystem, key):
            entry = _entry(self.name, filesystem.info(key))
        mode = stat.S_IFDIR | 0o755 if entry.is_dir else stat.S_IFREG | 0o644
        modified_s = entry.modified_s
        return os.stat_result((mode, 0, 0, 1, 0, 0, entry.size_bytes, modified_s, modified_s, modified_s))

    def exists(self, **_: Any) -> bool:
        """Return whether a file exists at this path or below it.

        Raises:
            OSError: the server cannot be reached.
        """
        try:
            self.stat()
        except FileNotFoundError:
            return False
        return True

    def is_dir(self, **_: Any) -> bool:
        """Return whether there are files below this path."""
        try:
            return stat.S_ISDIR(self.stat().st_mode)
        except FileNotFoundError:
            return False

    def is_file(self, **_: Any) -> bool:
        """Return whether a file exists at this path."""
        try:
            return stat.S_ISREG(self.stat().st_mode)
        except FileNotFoundError:
            return False

    def is_symlink(self) -> bool:
        """Return False: a store has no links."""
        return False

    def resolve(self, strict: bool = False) -> "RemotePath":
        """Return the path itself, which is absolute and has no links."""
        return self

    def absolute(self) -> "RemotePath":
        """Return the path itself."""
        return self

    def expanduser(self) -> "RemotePath":
        """Return the path itself."""
        return self

    def iterdir(self) -> Iterator["RemotePath"]:  # type: ignore[override]
        """Yield files and folders of a folder, by name."""
        for entry in self.entries():
            yield self / entry.name

    def glob(self, pattern: str, **_: Any) -> Iterator["RemotePath"]:  # type: ignore[override]
        """Yield the entries of the folder whose names match a pattern without a slash, or none without a folder."""
        assert "/" not in pattern
        try:
            entries = self.entries()
        except FileNotFoundError:
            return
        for entry in entries:
            if fnmatch.fnmatchcase(entry.name, pattern):
                yield self / entry.name

    def open(self, mode: str = "r", *_: Any, **__: Any) -> Any:
        """Open the file for random reads ("rb") or for writing once from its start ("wb").

        Raises:
            OSError: the file cannot be opened.
        """
        assert mode in ("rb", "wb"), mode
        with self._requests() as (filesystem, key):
            # Reads are sent to the server unchanged: read-ahead would fetch megabytes around each small part of a file.
            opened = filesystem.open(key, mode, cache_type="none") if mode == "rb" else filesystem.open(key, mode)
        raw = _TranslatedFile(opened, self, is_read=mode == "rb")
        return BufferedReader(raw, _READ_BUFFER_BYTES) if mode == "rb" else raw

    def read_range(self, start: int, size: int) -> bytes:
        """Return `size` bytes of the file from `start` on, fewer at its end, by one request."""
        with self._requests() as (filesystem, key):
            return bytes(filesystem.cat_file(key, start=start, end=start + size))

    def read_bytes(self) -> bytes:
        """Return the content of the file."""
        with self._requests() as (filesystem, key):
            return bytes(filesystem.cat_file(key))

    def write_bytes(self, data: Any) -> int:
        """Write the file by one request: it then has its content, or does not exist."""
        with self._requests() as (filesystem, key):
            self._make_parents(filesystem, key)
            filesystem.pipe_file(key, bytes(data))
        return len(data)

    def read_text(self, encoding: str | None = None, errors: str | None = None, newline: str | None = None) -> str:
        """Return the text of the file."""
        return self.read_bytes().decode(encoding or "utf-8", errors or "strict")

    def write_text(
        self, data: str, encoding: str | None = None, errors: str | None = None, newline: str | None = None
    ) -> int:
        """Write text by one request."""
        return self.write_bytes(data.encode(encoding or "utf-8", errors or "strict"))

    def mkdir(self, mode: int = 0o777, parents: bool = False, exist_ok: bool = False) -> None:
        """Create the folder if the file system has folders. A bucket is never created."""
        if self.scheme not in OBJECT_STORES:
            with self._requests() as (filesystem, key):
                filesystem.makedirs(key, exist_ok=True)

    def _make_parents(self, filesystem: Any, key: str) -> None:
        """Create the folders above a file, if the file system has folders."""
        above = key.rstrip("/").rpartition("/")[0]
        if self.scheme not in OBJECT_STORES and above:
            filesystem.makedirs(above, exist_ok=True)

    def rename(self, target: Any) -> Any:
        """Move a file: on an object store by a copy and a deletion."""
        with self._requests() as (filesystem, key):
            new_key = RemotePath(target)._open_filesystem()[1]
            if _is_pattern(key):
                filesystem.cp_file(key, new_key)
                filesystem.rm_file(key)
            else:
                filesystem.mv(key, new_key)
        return target

    def unlink(self, missing_ok: bool = False) -> None:
        """Delete the file."""
        try:
            self.stat()
            with self._requests() as (filesystem, key):
                filesystem.rm_file(key)
        except FileNotFoundError:
            if not missing_ok:
                raise

    def delete_tree(self) -> None:
        """Delete the file, or all files below this path, if there are any."""
        try:
            with self._requests() as (filesystem, key):
                if _is_pattern(key):
                    self._delete_each(filesystem, key)
                else:
                    filesystem.rm(key, recursive=True)
        except FileNotFoundError:
            return

    def _delete_each(self, filesystem: Any, key: str) -> None:
        """Delete all files below a key one by one, then the folders if the file system has folders."""
        has_folders = self.scheme not in OBJECT_STORES
        infos = filesystem.find(key, withdirs=has_folders, detail=True)
        for name in sorted(infos, reverse=True):
            is_folder = infos[name].get("type") == "directory"
            (filesystem.rmdir if is_folder else filesystem.rm_file)(name)

    def download(self, target: Path) -> None:
        """Copy the file to a path of this machine."""
        with self._requests() as (filesystem, key):
            filesystem.get_file(key, str(target))

    def upload(self, source: Path) -> None:
        """Write the file from a file of this machine."""
        with self._requests() as (filesystem, key):
            self._make_parents(filesystem, key)
            filesystem.put_file(str(source), key)


def check_protocol(name: str, key: str) -> None:
    """Check that the protocol of a URL is known and its package installed, without a request.

    Raises:
        ConfigError: the protocol cannot be used.
    """
    if not is_remote(name):
        return
    try:
        RemotePath(name)._open_filesystem()
    except ConfigError as error:
        raise ConfigError(f"{key}: {error}") from None


def check_remote_writable(folder: RemotePath) -> None:
    """Write a small file to a folder, read it back and delete it. Raise RemoteError if a request fails."""
    probe = folder / f".moefold-{uuid.uuid4().hex}"
    try:
        probe.write_bytes(b"moefold")
        if probe.read_bytes() != b"moefold":
            raise RemoteError(errno.EIO, "a file that was just written has other content", str(folder))
        probe.unlink()
    except FileNotFoundError as error:
        raise RemoteError(errno.ENOENT, "there is no such bucket or folder", str(folder)) from error


class _TranslatedFile(RawIOBase):
    """Raw file of fsspec for random reads or writing once, with errors of the library as OSError."""

    def __init__(self, opened: Any, path: RemotePath, *, is_read: bool) -> None:
        self._opened = opened
        self._path = path
        self._is_read = is_read

    def readable(self) -> bool:
        """Return whether the file is open for reading."""
        return self._is_read

    def seekable(self) -> bool:
        """Return whether the file is open for reading."""
        return self._is_read

    def writable(self) -> bool:
        """Return whether the file is open for writing."""
        return not self._is_read

    def seek(self, offset: int, whence: int = SEEK_SET) -> int:
        """Set the position."""
        return int(self._opened.seek(offset, whence))

    def tell(self) -> int:
        """Return the position in the file, in bytes."""
        return int(self._opened.tell())

    def readinto(self, buffer: Any) -> int:
        """Read into a buffer, and return the number of bytes, 0 at the end."""
        target = memoryview(buffer).cast("B")
        content = self._call("read", len(target))
        target[: len(content)] = content
        return len(content)

    def write(self, data: Any) -> int:
        """Write bytes. An object store sends them in parts of some megabytes."""
        return int(self._call("write", data))

    def close(self) -> None:
        """Close the file. After writing, send the remaining bytes and complete the file."""
        if not self.closed:
            super().close()
            self._call("close")

    def _call(self, name: str, *arguments: Any) -> Any:
        try:
            return getattr(self._opened, name)(*arguments)
        except Exception as error:
            raise _translated(error, self._path) from error


def _is_pattern(key: str) -> bool:
    """Return whether fsspec interprets a key as a pattern in requests for several files (`rm`, `mv`)."""
    return any(character in key for character in "*?[")


def _entry(name: str, info: dict[str, Any]) -> RemoteEntry:
    is_dir = info.get("type") == "directory"
    return RemoteEntry(name, is_dir, 0 if is_dir else int(info.get("size") or 0), _modified_s(info))


def _modified_s(info: dict[str, Any]) -> float:
    """Return the time of the last change from the fields of an entry, whose names depend on the file system."""
    for key in ("LastModified", "mtime", "last_modified", "updated", "modified", "created"):
        value = info.get(key)
        if isinstance(value, str):
            try:
                value = datetime.fromisoformat(value)
            except ValueError:
                continue
        if isinstance(value, datetime):
            return value.timestamp()
        if isinstance(value, int | float):
            return float(value)
    return 0.0


def _translated(error: Exception, path: RemotePath) -> RemoteError:
    """Translate an error of a library. Each library has its own classes for network, credentials and answers."""
    number = error.errno if isinstance(error, OSError) and error.errno else errno.EIO
    return RemoteError(number, _reason(error), str(path))


def _reason(error: BaseException) -> str:
    """Return the reason of a failure in one line."""
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    line = " ".join((text or "").split())[:_MAX_REASON_CHARS].strip()
    if line and isinstance(error, OSError):
        return line
    name = type(error).__name__
    return f"{name}: {line}" if line else name
