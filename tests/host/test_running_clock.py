"""A clock that leaves out the time while its process was stopped."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from moefold.host.running_clock import RunningClock

STOP_S = 2.0
PROGRAM = """
import sys, time
from moefold.host import running_clock
running_clock.MIN_STOP_S = 1.0
clock = running_clock.RunningClock()
clock.start()
def read():
    return time.monotonic(), clock(), time.monotonic()
began_s = read()
print("runs", flush=True)
sys.stdin.readline()
print(*began_s, *read(), clock.pop_stopped_s(), clock.pop_stopped_s())
clock.end()
"""


THREAD_TIMES = Path("/proc/self/schedstat").exists()


@pytest.mark.skipif(not THREAD_TIMES, reason="the kernel does not tell the CPU time of a thread")
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
        before_s, began_s, after_s, *rest = map(float, process.stdout.readline().split())
    last_before_s, ended_s, last_after_s, stopped_s, again_s = rest
    # The process may lose its core between two readings: real time bounds the time of the clock from both sides.
    shortest_s, longest_s = last_before_s - after_s, last_after_s - before_s
    assert 1.0 <= stopped_s <= longest_s
    assert shortest_s - 1e-6 <= ended_s - began_s + stopped_s <= longest_s + 1e-6
    assert again_s == 0.0


@pytest.mark.skipif(not THREAD_TIMES, reason="the kernel does not tell the CPU time of a thread")
def test_time_with_a_held_interpreter_is_not_a_stop(monkeypatch):
    monkeypatch.setattr("moefold.host.running_clock.MIN_STOP_S", 0.4)
    clock = RunningClock()
    clock.start()
    try:
        # One call into C, which lets no other thread run.
        for _ in range(2):
            sorted(range(-1_000_000, 1_000_000), key=abs, reverse=True)
        assert clock.pop_stopped_s() == 0.0
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
    assert clock.pop_stopped_s() == 0.0
