"""A clock that leaves out the time in which its process was stopped."""

import os
import signal
import subprocess
import sys
import time

import pytest

from moefold.host.running_clock import RunningClock

STOP_S = 2.0
PROGRAM = """
import sys, time
from moefold.host import running_clock
running_clock.MIN_STOP_S = 1.0
clock = running_clock.RunningClock()
clock.start()
began_s = clock(), time.monotonic()
print("runs", flush=True)
sys.stdin.readline()
print(clock() - began_s[0], time.monotonic() - began_s[1], clock.take_stopped_s(), clock.take_stopped_s())
clock.end()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs the CPU time of a thread")
def test_the_time_of_a_stop_is_left_out_and_reported_once():
    words = [sys.executable, "-c", PROGRAM]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        assert process.stdout.readline() == "runs\n"
        os.kill(process.pid, signal.SIGSTOP)
        time.sleep(STOP_S)
        os.kill(process.pid, signal.SIGCONT)
        process.stdin.write("\n")
        process.stdin.flush()
        ran_s, real_s, stopped_s, again_s = map(float, process.stdout.readline().split())
    assert real_s >= STOP_S
    assert stopped_s == pytest.approx(STOP_S, abs=0.5)
    assert ran_s == pytest.approx(real_s - stopped_s, abs=1e-3)
    assert again_s == 0.0


def test_time_in_which_the_interpreter_is_held_is_no_stop(monkeypatch):
    monkeypatch.setattr("moefold.host.running_clock.MIN_STOP_S", 0.4)
    clock = RunningClock()
    clock.start()
    try:
        # One call into C, which lets no other thread run.
        for _ in range(2):
            sorted(range(-1_000_000, 1_000_000), key=abs, reverse=True)
        assert clock.take_stopped_s() == 0.0
    finally:
        clock.end()


def test_without_a_thread_all_time_counts(monkeypatch):
    clock = RunningClock()
    clock.start()
    clock.end()
    before_s = clock()
    now_s = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now_s + 100)
    assert clock() - before_s >= 99
    assert clock.take_stopped_s() == 0.0
