"""The way out of a rank.

Exit statuses of ranks and commands. Torch-free.

Tell errors of memory from others, and say them in one sentence. Torch-free: torch's are known by name and words.
"""

import errno
import os
import re
import sys
from typing import NoReturn

from moefold.host.memory import available_host_memory, available_process_memory
from moefold.terminal import format_bytes


def hard_exit(status: int) -> NoReturn:
    """End this process at once, with no more than what it printed brought out.

    An interpreter that ends in the ordinary way kills the threads that come for its lock. One of gloo's, which still
    has the tensors of the last collective to give back, would abort the process then.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


EXIT_FAILED = 1
"""The command ran and its answer is no, or a rank failed."""
EXIT_USER_ERROR = 2
"""The user's settings cannot work; a message has said why."""
SIGNAL_STATUS = 128
"""A run that a signal ended exits with 128 + its number, as shells do: 130 for Ctrl-C."""


OOM_ERROR_NAMES = ("OutOfMemoryError", "_ArrayMemoryError")
"""Of torch and numpy."""
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
"""In the messages of other errors that stand for memory that is not there."""
_REQUESTED_SIZE = re.compile(r"allocate (\d+) bytes|[Aa]llocate (\d[\d.]* ?[KMGTP]?i?B)")
OOM_SUGGESTION = (
    "choose a smaller model, batch or sequence, or more ranks; for training `moefold memory RECIPE --dry` shows what "
    "takes the memory, and train.recompute, train.micro_batch_size, parallel.zero and train.offload save it"
)


def oom_reason(error: BaseException | None) -> str:
    """Return what an error of memory says in its first sentence, or "" for another error.

    Args:
        error: an exception; what it was raised from counts as well.
    """
    while error is not None:
        if _is_oom_error(error):
            return str(error).strip().partition("\n")[0].partition(". GPU")[0] or type(error).__name__
        error = error.__cause__
    return ""


def oom_message(error: BaseException) -> str:
    """Return one message on an error of memory, with what was asked for and what there is; "" for another error."""
    reason = oom_reason(error)
    if not reason:
        return ""
    found = _REQUESTED_SIZE.search(reason)
    asked = ""
    if found is not None:
        asked = f": {format_bytes(int(found[1])) if found[1] else found[2]} were asked for at once"
    return f"out of memory{asked or f' ({reason})'}{'' if 'CUDA' in reason else _available_memory_text()}; {OOM_SUGGESTION}"


def _available_memory_text() -> str:
    rooms = [room for room in (available_host_memory(), available_process_memory()) if room is not None]
    least = min(rooms, key=lambda room: room.size)
    return f", and {format_bytes(least.size)} are {least.description}"


def _is_oom_error(error: BaseException) -> bool:
    if isinstance(error, MemoryError) or type(error).__name__ in OOM_ERROR_NAMES:
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError | ValueError) and any(words in str(error) for words in OOM_MESSAGES)
