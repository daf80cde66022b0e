"""Compute time and waiting time of a rank, by a clock that the test sets."""

import pytest

from moefold.comm.comm_timer import CommTimer
from tests.moved_clock import MovedClock


def test_working_inside_waiting_is_compute_time():
    clock = MovedClock(1.0)
    timer = CommTimer(is_on=True, host_clock=clock)
    timer.start()
    clock.move(1)
    with timer.waiting():
        clock.move(2)
        with timer.waiting():
            clock.move(4)
        with timer.working():
            clock.move(8)
            with timer.waiting():
                clock.move(16)
    clock.move(32)
    assert timer.read() == (63, 2 + 4 + 16)


def test_an_interval_begins_at_the_first_start_and_ends_when_read():
    clock = MovedClock(1.0)
    timer = CommTimer(is_on=True, host_clock=clock)
    assert timer.read() == (0, 0)
    with timer.waiting():
        clock.move(1)
    timer.start()
    clock.move(2)
    timer.start()
    assert timer.read() == (2, 0)
    assert timer.read() == (0, 0)


def test_an_error_while_waiting_ends_the_wait():
    clock = MovedClock(1.0)
    timer = CommTimer(is_on=True, host_clock=clock)

    def fail_while_waiting() -> None:
        with timer.waiting():
            clock.move(1)
            raise RuntimeError

    timer.start()
    with pytest.raises(RuntimeError):
        fail_while_waiting()
    clock.move(2)
    assert not timer.is_waiting
    assert timer.read() == (3, 1)


def test_a_timer_reads_the_real_clock_by_default():
    timer = CommTimer(is_on=True)
    timer.start()
    with timer.waiting():
        pass
    total_s, waited_s = timer.read()
    assert 0 <= waited_s <= total_s


def test_a_timer_that_is_off_counts_nothing():
    timer = CommTimer()
    timer.start()
    with timer.waiting():
        assert not timer.is_waiting
    assert timer.read() == (0, 0)
