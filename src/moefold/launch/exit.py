"""Process exit: exit statuses, immediate exit, and one-line messages for out-of-memory errors.

Torch-free: torch's out-of-memory errors are recognised by class name and message.
"""

import errno
import os
import re
import sys
from typing import NoReturn

from moefold.host.memory import available_host_memory, available_process_memory
from moefold.terminal import format_bytes


def hard_exit(status: int) -> NoReturn:
    """Flush stdout and stderr and call `os._exit`, skipping interpreter shutdown.

    Ordinary shutdown kills threads that wait for the GIL. A gloo thread that still has to release the tensors of the
    last collective would then abort the process.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


OOM_ERROR_NAMES = ("OutOfMemoryError", "_ArrayMemoryError")
"""Class names of the out-of-memory errors of torch and numpy."""
OOM_MESSAGES = (
    "can't allocate memory",
    "bad_alloc",
    "bad allocation",
    "CUDA out of memory",
    "array is too big",
    "Storage size calculation overflowed",
    "integer multiplication overflow",
    "Maximum allowed dimension exceeded",
)
"""Fragments of messages by which other error classes report failed allocations."""
_REQUESTED_SIZE = re.compile(r"allocate (\d+) bytes|[Aa]llocate (\d[\d.]* ?[KMGTP]?i?B)")
OOM_SUGGESTION = (
    "choose a smaller model, batch or sequence, or more ranks; for training `moefold memory RECIPE --dry` shows what "
    "takes the memory, and train.recompute, train.micro_batch_size, parallel.zero and train.offload save it"
)


def oom_reason(error: BaseException | None) -> str:
    """Return the first sentence of an out-of-memory error, or "" for any other error.

    Args:
        error: an exception; the chain of its `__cause__` is searched too.
    """
    while error is not None:
        if _is_oom_error(error):
            return str(error).strip().partition("\n")[0].partition(". GPU")[0] or type(error).__name__
        error = error.__cause__
    return ""


def oom_message(error: BaseException) -> str:
    """Return a one-line message for an out-of-memory error, with requested and available bytes; else ""."""
    reason = oom_reason(error)
    if not reason:
        return ""
    match = _REQUESTED_SIZE.search(reason)
    requested = ""
    if match is not None:
        requested = f": {format_bytes(int(match[1])) if match[1] else match[2]} were requested at once"
    return (
        f"out of memory{requested or f' ({reason})'}{'' if 'CUDA' in reason else _available_memory_text()}; "
        f"{OOM_SUGGESTION}"
    )


def _available_memory_text() -> str:
    limits = [limit for limit in (available_host_memory(), available_process_memory()) if limit is not None]
    least = min(limits, key=lambda limit: limit.size)
    return f", and {format_bytes(least.size)} are {least.description}"


def _is_oom_error(error: BaseException) -> bool:
    if isinstance(error, MemoryError) or type(error).__name__ in OOM_ERROR_NAMES:
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError | ValueError) and any(fragment in str(error) for fragment in OOM_MESSAGES)
