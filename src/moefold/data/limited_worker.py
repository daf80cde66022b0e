"""Program that limits its own memory and runs another program: `limited_worker.py PROGRAM MEMORY_BYTES HARD_BYTES`.

It imports only the standard library. The other program calls `serve` with an object that answers requests. A request is
a line of JSON with its limits and the number of bytes after it. An answer has the same form.
"""

import contextlib
import json
import os
import resource
import runpy
import signal
import sys
from typing import Any

RESERVED_BYTES_PER_CORE = 192 << 20
"""Address space that the allocator and the stack of a thread reserve but do not use."""


def main() -> None:
    """Set the limits and run the program."""
    program, soft, hard = sys.argv[1:]
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    set_memory_limit(int(soft), int(hard))
    sys.argv = [program]
    runpy.run_path(program, {"serve": serve}, "__main__")


def serve(worker: Any) -> None:
    """Answer requests with the methods of an object, which return a header and bytes, until standard input ends."""
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    while line := requests.readline():
        request = json.loads(line)
        payload = requests.read(request["bytes"])
        set_memory_limit(request["memory_bytes"])
        # The timer's SIGPROF kills the process when the time is over.
        signal.setitimer(signal.ITIMER_PROF, request["cpu_s"])
        try:
            header, data = getattr(worker, request["do"])(request, payload)
        except BaseException as error:  # noqa: BLE001 - Rust cores panic with an exception that is not an Exception
            header, data = {"refused": str(error) or type(error).__name__}, b""
        signal.setitimer(signal.ITIMER_PROF, 0)
        # Texts of templates may contain lone surrogates.
        text = json.dumps(header | {"bytes": len(data)}, ensure_ascii=False)
        answers.write(text.encode("utf-8", "surrogatepass") + b"\n" + data)
        answers.flush()


def set_memory_limit(soft: int, hard: int = 0) -> None:
    """Limit the memory of this process. macOS has no such limit.

    The soft limit cannot exceed `hard` later. 0 leaves the hard limit unchanged.
    """
    reserved = RESERVED_BYTES_PER_CORE * (os.cpu_count() or 1)
    for kind, extra in ((resource.RLIMIT_DATA, 0), (resource.RLIMIT_AS, reserved)):
        limit = resource.getrlimit(kind)[1]
        highest = [value for value in (limit, hard + extra if hard else limit) if value != resource.RLIM_INFINITY]
        top = min(highest) if highest else resource.RLIM_INFINITY
        value = soft + extra if top == resource.RLIM_INFINITY else min(soft + extra, top)
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(kind, (value, top))


if __name__ == "__main__":
    main()
