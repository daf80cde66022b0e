"""Processes are recognised by number and start time, and signals wait for the start of a child."""

import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from moefold.host.processes import ALIVE, GONE, STOPPED, ProcessId, block_signals

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")


def settled(process: ProcessId, state: str) -> bool:
    deadline = time.monotonic() + 5
    while process.state() != state and time.monotonic() < deadline:
        time.sleep(0.01)
    return process.state() == state


def test_alive_stopped_killed_and_not_yet_waited_for():
    child = subprocess.Popen(["sleep", "60"])
    fields = Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()
    process = replace(ProcessId.current(), number=child.pid, started=fields[19])
    assert settled(process, ALIVE)
    child.send_signal(signal.SIGSTOP)
    assert settled(process, STOPPED)
    child.kill()
    assert settled(process, GONE)  # a zombie still
    child.wait()
    assert process.state() == GONE


def test_a_number_that_was_given_to_another_process_is_not_the_one():
    own = ProcessId.current()
    assert own.number == os.getpid()
    assert own.state() == ALIVE
    assert replace(own, started="1").state() == GONE


def test_a_signal_that_another_thread_receives_waits_for_the_start_of_a_child():
    """The mask of a thread holds only for this thread, and Python runs every handler in the main thread."""
    is_running, is_over = threading.Event(), threading.Event()

    def receive() -> None:
        is_running.set()
        is_over.wait()

    receiver = threading.Thread(target=receive)
    receiver.start()
    is_running.wait()
    ends: list[str] = []
    try:
        with pytest.raises(KeyboardInterrupt):
            _interrupt_inside(ends)
    finally:
        is_over.set()
        receiver.join()
    assert ends == ["of the context"]


def _interrupt_inside(ends: list[str]) -> None:
    """Send SIGINT to this process in a context that blocks it; note that the context ran to its end."""
    with block_signals([signal.SIGINT], starts_python=True):
        os.kill(os.getpid(), signal.SIGINT)
        for _ in range(1000):
            time.sleep(0)
        ends.append("of the context")
