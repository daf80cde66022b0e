"""Files that a user never means, and a process of small means in which a command meets them."""

import json
import os
import resource
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

# What commands import late is imported here, once for all forks.
import moefold.checkpoint.inspect
import moefold.convert.export_folder
import moefold.convert.import_folder
import moefold.data.dataset
import moefold.data.huggingface
import moefold.inference.scoring
import moefold.launch.fitting
import moefold.launch.ranks  # noqa: F401
from moefold.cli.main import COMMANDS, main

for _name in COMMANDS:
    import_module(f"moefold.cli.{_name.replace('-', '_')}")

MEMORY_BYTES = 1 << 29
"""More address space than the process has when it starts; what is read before it is judged would exceed it."""
CPU_S = 20
HUGE_BYTES = 3 << 30


@dataclass(frozen=True)
class Outcome:
    """What a command did."""

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
    """Deep enough for what walks through it, not for the parser."""
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


def run_bounded(words: Sequence[str], folder: Path) -> Outcome:
    """Run a command in a fork of this process with little memory and processor time.

    The fork inherits all modules, so it costs milliseconds; what it may use comes on top of what this process has.
    """
    errors = folder / "stderr"
    child = os.fork()
    if child == 0:
        _run_and_leave(words, errors)
    # A command that waits uses no processor time: this ends it.
    timer = threading.Timer(240, os.kill, (child, signal.SIGKILL))
    timer.start()
    _, status = os.waitpid(child, 0)
    timer.cancel()
    return Outcome(os.waitstatus_to_exitcode(status), errors.read_text(errors="replace"))


def _run_and_leave(words: Sequence[str], errors: Path) -> None:
    status = 99
    try:
        with errors.open("w") as file, Path(os.devnull).open("w") as nothing:
            os.dup2(file.fileno(), 2)
            os.dup2(nothing.fileno(), 1)
            sys.stdout, sys.stderr = nothing, file
            pages = int(Path("/proc/self/statm").read_text().split()[0])
            most = pages * resource.getpagesize() + MEMORY_BYTES
            resource.setrlimit(resource.RLIMIT_AS, (most, most))
            resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S))
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            try:
                status = main(words)
            except BaseException:  # noqa: BLE001 - a traceback is what the test looks for
                traceback.print_exc()
    finally:
        os._exit(status)
