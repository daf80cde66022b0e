"""Settings of glibc's malloc that keep freed memory for the next training step."""

import ctypes
import os
import sys
from collections.abc import Mapping

M_TRIM_THRESHOLD = -1
"""Of glibc's malloc.h."""
M_MMAP_THRESHOLD = -3
"""Of glibc's malloc.h."""
TRIM_DISABLED = -1
DEFAULT_TRIM_BYTES = 1 << 17
TUNABLES_VARIABLE = "GLIBC_TUNABLES"
PRELOAD_VARIABLE = "LD_PRELOAD"

MMAP_THRESHOLD_BYTES = 1 << 20


MAX_MMAP_THRESHOLD_BYTES = (1 << 30, 1 << 25)
"""What is mapped by itself even where memory is kept; older versions, such as 2.31, take the second at most."""


MALLOC_VARIABLES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_")
"""Variables by which a user tells glibc the same."""


def keeps_freed_blocks(device_type: str, environment: Mapping[str, str] = os.environ) -> bool:
    """Whether `keep_freed_blocks` does something: on a CPU, with glibc's malloc that no variable has told anything."""
    is_told = any(name in environment for name in MALLOC_VARIABLES) or "glibc.malloc" in environment.get(
        TUNABLES_VARIABLE, ""
    )
    # jemalloc, tcmalloc and mimalloc go by their names.
    is_replaced = "malloc" in environment.get(PRELOAD_VARIABLE, "")
    return device_type == "cpu" and not (is_told or is_replaced) and _mallopt() is not None


def malloc_message(device_type: str, environment: Mapping[str, str] = os.environ) -> str:
    """What is said of it, in a few words; empty where glibc is told nothing."""
    return "freed memory is kept" if keeps_freed_blocks(device_type, environment) else ""


def keep_freed_blocks(device_type: str, environment: Mapping[str, str] = os.environ) -> None:
    """Have glibc keep what is freed, but for blocks of a GiB or more (32 MiB in older versions).

    A step frees its activations and gradients, and the next one needs as much. glibc by default returns the end of its
    heap, and each block of 32 MiB or more, to the system, which then clears every page of them anew: up to a quarter of
    a step of a large layer (docs/log.md). The process has its peak for good instead, and gaps in it. For the whole
    process; other C libraries stay as they are.
    """
    mallopt = _mallopt() if keeps_freed_blocks(device_type, environment) else None
    # A size that is refused changes nothing. Any that is taken stops glibc from raising it by itself: this one first.
    if mallopt is not None and any(mallopt(M_MMAP_THRESHOLD, size) for size in MAX_MMAP_THRESHOLD_BYTES):
        mallopt(M_TRIM_THRESHOLD, TRIM_DISABLED)


def return_large_blocks() -> None:
    """Have glibc map each block of a MiB or more by itself, unmap it when it is freed, and trim its heap.

    It by default raises that size to the largest block that was freed, up to 32 MiB. The buffers of a conversion
    then lie in a heap whose gaps the next ones do not fit: it grew by a tenth of the model (docs/log.md). For the whole
    process; other C libraries stay as they are.
    """
    mallopt = _mallopt()
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, MMAP_THRESHOLD_BYTES)
        mallopt(M_TRIM_THRESHOLD, DEFAULT_TRIM_BYTES)


def _mallopt() -> "ctypes._NamedFuncPointer | None":
    return getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
