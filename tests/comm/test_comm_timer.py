"""Time that is a rank's own, and time that it waits."""

import time

import pytest

from moefold.comm.comm_timer import CommTimer

STEP_S = 0.02


def test_waiting_counts_and_working_inside_of_it_does_not():
    clock = CommTimer(is_on=True)
    clock.start()
    time.sleep(STEP_S)
    with clock.waiting():
        time.sleep(STEP_S)
        with clock.waiting():
            time.sleep(STEP_S)
        with clock.working():
            time.sleep(STEP_S)
            with clock.waiting():
                time.sleep(STEP_S)
    total_s, waited_s = clock.read()
    assert total_s == pytest.approx(5 * STEP_S, rel=0.5)
    assert total_s - waited_s == pytest.approx(2 * STEP_S, rel=0.5)


def test_a_span_begins_at_the_first_start_and_ends_when_read():
    clock = CommTimer(is_on=True)
    assert clock.read() == (0.0, 0.0)
    with clock.waiting():
        time.sleep(STEP_S)
    clock.start()
    time.sleep(STEP_S)
    clock.start()
    total_s, waited_s = clock.read()
    assert total_s >= STEP_S
    assert waited_s == 0.0
    assert clock.read() == (0.0, 0.0)


def test_an_error_while_waiting_leaves_the_clock_as_it_was():
    clock = CommTimer(is_on=True)
    clock.start()
    with pytest.raises(RuntimeError), clock.waiting():
        raise RuntimeError
    assert not clock.is_waiting


def test_a_clock_that_is_off_counts_nothing():
    clock = CommTimer()
    clock.start()
    with clock.waiting():
        assert not clock.is_waiting
    assert clock.read() == (0.0, 0.0)
