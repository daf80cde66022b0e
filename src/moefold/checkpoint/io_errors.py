"""Errors of checkpoint files as one message: what could not be read or written, why, and the way out of a full disk."""

import errno
import os
import pickle
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch.distributed.checkpoint.api import CheckpointException

from moefold.checkpoint.find_checkpoint import complete_checkpoints
from moefold.errors import ConfigError
from moefold.message_text import first_line, format_list
from moefold.remote_path import RemoteError

_DISK_FULL_ERRNOS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_TRUNCATED_WRITE = re.compile(r"enforce fail at inline_container|unexpected pos \d+ vs \d+|PytorchStreamWriter")
"""Messages of the DCP library for a file whose end could not be written. Other errors keep their message."""
_CORRUPT_FILE_ERRORS = (
    AssertionError,
    AttributeError,
    EOFError,
    IndexError,
    KeyError,
    MemoryError,
    OverflowError,
    RuntimeError,
    TypeError,
    pickle.UnpicklingError,
)
"""Exceptions that the library raises on files that contradict their index."""


@contextmanager
def translate_read_errors(path: Path) -> Iterator[None]:
    """Turn any exception raised while reading a checkpoint, even a forged one, into a ConfigError."""
    with translate_io_errors(f"checkpoint {str(path)!r} cannot be read", *_CORRUPT_FILE_ERRORS):
        yield


@contextmanager
def translate_io_errors(failure: str, *extra_errors: type[Exception], disk: Path | None = None) -> Iterator[None]:
    """Turn I/O errors and the listed exceptions into a ConfigError.

    Args:
        failure: the operation that failed. The reason is appended.
        extra_errors: other exceptions to translate.
        disk: the folder of checkpoints in writing. If its disk is full, the message has the free space and the remedy.

    Raises:
        ConfigError: in place of the translated exceptions.
    """
    expected: tuple[type[Exception], ...] = (OSError, ValueError, *extra_errors)
    try:
        yield
    except RemoteError as error:
        raise ConfigError(f"{failure}: {error}") from error
    except ConfigError:
        raise
    except CheckpointException as error:
        rank, cause = _root_cause({rank: cause for rank, (cause, _) in error.failures.items()})
        if isinstance(cause, RemoteError):
            raise ConfigError(f"{failure}: {cause}") from error
        if isinstance(cause, ConfigError):
            raise cause from None
        if not isinstance(cause, (OSError, EOFError, pickle.UnpicklingError, RuntimeError, ValueError, *extra_errors)):
            raise
        raise ConfigError(f"{failure}: {_describe_failure(cause, disk, rank)}") from error
    except expected as error:
        raise ConfigError(f"{failure}: {_describe_failure(error, disk)}") from error


def _root_cause(causes: dict[int, BaseException]) -> tuple[int, BaseException]:
    """Return the most informative failure and its rank: a full disk is an OSError on one rank, on others a later error.

    A rank that also fails to write the end of its file reports the library's error instead.
    """
    ranked = [item for kind in (ConfigError, OSError) for item in causes.items() if isinstance(item[1], kind)]
    return (ranked or list(causes.items()))[0]


def _describe_failure(error: BaseException, disk: Path | None, rank: int | None = None) -> str:
    """Return the reason of a failure in one line. A full disk is named with file, free space and remedy."""
    text = error.strerror if isinstance(error, OSError) and error.strerror else first_line(error)
    if disk is None:
        return text
    is_cut_short = isinstance(error, RuntimeError) and _TRUNCATED_WRITE.search(str(error)) is not None
    if not is_cut_short and not (isinstance(error, OSError) and error.errno in _DISK_FULL_ERRNOS):
        return text if isinstance(error, OSError) else f"{text}; {_describe_free_space(disk)}"
    written = Path(os.fsdecode(error.filename)).name if isinstance(error, OSError) and error.filename else ""
    if not written and rank is not None:
        # DCP begins the names of a rank's files with its number.
        written = format_list(sorted({path.name for path in disk.glob(f".step-*.partial/__{rank}_*")}))
    name = f"file {written}" if written else "a file"
    failure = f"{name} could not be written to its end" + ("" if is_cut_short else f" ({text})")
    saved = complete_checkpoints(disk)
    way_on = f"to resume from {saved[-1].name}" if saved else "again, from the start: there is no checkpoint yet"
    return f"{failure}; {_describe_free_space(disk)}; free disk space, then run the same command {way_on}"


def _describe_free_space(folder: Path) -> str:
    """Return a description of the free space on the disk of a folder."""
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.is_dir())
    free_mib = shutil.disk_usage(existing).free / 2**20
    return "the disk is full" if free_mib < 1 else f"{free_mib:,.0f} MiB are free there"
