"""Memory of freed tensors goes back to the system at once, so that the peak of a conversion does not grow with it."""

import ctypes
import sys

M_MMAP_THRESHOLD = -3
"""Of malloc.h of glibc."""
LARGE_BYTES = 1 << 20


def return_large_blocks() -> None:
    """Have the C library map each block of a MiB or more by itself, and unmap it when it is freed.

    glibc by default raises that size to the largest block that was freed, up to 32 MiB. The buffers of a conversion
    then lie in a heap whose gaps the next ones do not fit: it grew by a tenth of the model (docs/log.md). For the whole
    process; other C libraries stay as they are.
    """
    if sys.platform == "linux" and (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)) is not None:
        mallopt(M_MMAP_THRESHOLD, LARGE_BYTES)
