import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from moefold.host.processes import ALIVE, GONE, STOPPED, ProcessId

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
