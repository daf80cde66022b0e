"""Program that limits its own memory and runs another program: `limited_worker.py PROGRAM MEMORY_BYTES HARD_BYTES`.

It imports only the standard library. The other program reads requests from standard input.
"""

import contextlib
import os
import resource
import runpy
import signal
import sys

RESERVED_BYTES_PER_CORE = 192 << 20
"""Address space that the allocator and the stack of a thread reserve without using it."""


def main() -> None:
    """Set the limits and run the program."""
    program, soft, hard = sys.argv[1:]
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    set_memory_limit(int(soft), int(hard))
    sys.argv = [program]
    runpy.run_path(program, {"set_memory_limit": set_memory_limit}, "__main__")


def set_memory_limit(soft: int, hard: int = 0) -> None:
    """Limit the memory of this process; macOS has no such limit.

    Args:
        soft: the limit in bytes.
        hard: limit that the soft one cannot exceed later; 0 leaves it as it is.
    """
    reserved = RESERVED_BYTES_PER_CORE * (os.cpu_count() or 1)
    for kind, more in ((resource.RLIMIT_DATA, 0), (resource.RLIMIT_AS, reserved)):
        most = resource.getrlimit(kind)[1]
        highest = [value for value in (most, hard + more if hard else most) if value != resource.RLIM_INFINITY]
        top = min(highest) if highest else resource.RLIM_INFINITY
        value = soft + more if top == resource.RLIM_INFINITY else min(soft + more, top)
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(kind, (value, top))


if __name__ == "__main__":
    main()
