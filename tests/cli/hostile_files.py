"""Files that a user never means, and a process with little memory and time for a command that reads them."""

import json
import os
import resource
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

# Modules that commands import late are imported here, once for all forks.
import moefold.checkpoint.stored_tensors
import moefold.convert.export_folder
import moefold.convert.import_folder
import moefold.data.dataset
import moefold.data.sources.huggingface
import moefold.inference.scoring
import moefold.launch.memory_check
import moefold.launch.ranks  # noqa: F401
from moefold.cli.main import COMMANDS, main

for _name in COMMANDS:
    import_module(f"moefold.cli.{_name.replace('-', '_')}")

MEMORY_BYTES = 1 << 29
"""More address space than the process has when it starts; reading a whole file before judging it would exceed it."""
CPU_S = 20
HUGE_BYTES = 3 << 30


@dataclass(frozen=True)
class Outcome:
    """The outcome of a command."""

    status: int
    """Exit status; negative: the signal that ended it."""
    errors: str
    """Its standard error."""


def make_pipe(path: Path) -> None:
    os.mkfifo(path)


def make_link_to_zeros(path: Path) -> None:
    path.symlink_to("/dev/zero")


def make_folder(path: Path) -> None:
    path.mkdir()


def make_empty(path: Path) -> None:
    path.touch()


def make_binary(path: Path) -> None:
    path.write_bytes(bytes(range(256)) * 16)


def make_huge(path: Path) -> None:
    """Three GiB of zeros that take no place on the disk."""
    with path.open("wb") as file:
        file.truncate(HUGE_BYTES)


def make_deep(path: Path) -> None:
    path.write_text("[" * 200_000)


def make_deep_object(path: Path) -> None:
    """Deep enough for code that walks through it, not for the parser."""
    path.write_text(json.dumps({"step": 1}) + "\n" + '{"step": 2, "a": ' + "[" * 900 + "]" * 900 + "}\n")


KINDS: dict[str, Callable[[Path], None]] = {
    "pipe": make_pipe,
    "zeros": make_link_to_zeros,
    "folder": make_folder,
    "empty": make_empty,
    "binary": make_binary,
    "huge": make_huge,
    "deep": make_deep,
    "deep object": make_deep_object,
}


def run_bounded(words: Sequence[str], path: Path, kinds: Sequence[str], folder: Path) -> dict[str, Outcome]:
    """Run a command once for each kind of file, in a fork of this process with little memory and processor time.

    The fork inherits all modules; its memory comes on top of this process's. Where a command ends it,
    another fork takes the next kind.
    """
    found: dict[str, Outcome] = {}
    while len(found) < len(kinds):
        left = [kind for kind in kinds if kind not in found]
        read, written = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(read)
            _run_and_leave(words, path, {kind: folder / kind for kind in left}, written)
        os.close(written)
        # A command that waits uses no processor time: this ends it.
        timer = threading.Timer(240, os.kill, (child, signal.SIGKILL))
        timer.start()
        with os.fdopen(read, "rb") as pipe:
            statuses = pipe.read()
        _, status = os.waitpid(child, 0)
        timer.cancel()
        ended = list(statuses) if len(statuses) == len(left) else [*statuses, os.waitstatus_to_exitcode(status)]
        for kind, one in zip(left, ended, strict=False):
            found[kind] = Outcome(one, (folder / kind).read_text(errors="replace"))
        remove(path)
    return found


def remove(path: Path) -> None:
    """Remove a file or an empty folder, if it is there."""
    if path.is_dir() and not path.is_symlink():
        path.rmdir()
    else:
        path.unlink(missing_ok=True)


def _run_and_leave(words: Sequence[str], path: Path, errors: Mapping[str, Path], statuses: int) -> None:
    """Run the command on each kind of file, and write its exit status as one byte, and its errors to a file."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        most = pages * resource.getpagesize() + MEMORY_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, 1)
        sys.stdout = os.fdopen(nothing, "w")
        for kind in errors:
            remove(path)
            KINDS[kind](path)
            used = resource.getrusage(resource.RUSAGE_SELF)
            seconds = int(used.ru_utime + used.ru_stime) + CPU_S
            resource.setrlimit(resource.RLIMIT_CPU, (seconds, resource.RLIM_INFINITY))
            with errors[kind].open("w") as sys.stderr:
                os.dup2(sys.stderr.fileno(), 2)
                status = 99
                try:
                    status = main(words)
                except BaseException:  # noqa: BLE001 - the test looks for a traceback
                    traceback.print_exc()
            os.write(statuses, bytes([status]))
    finally:
        os._exit(99)
