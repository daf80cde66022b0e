"""Bandwidth of offloaded tensors."""

import math

import pytest

from moefold.offload.backend import STALE_GROWTH_FACTOR, BandwidthMeter
from tests.moved_clock import MovedClock


def test_transfers_at_the_same_time_count_their_time_once():
    clock = MovedClock()
    meter = BandwidthMeter(clock)
    with meter.measure_transfer(100):
        clock.move(1.0)
        with meter.measure_transfer(300):
            clock.move(2.0)
        clock.move(4.0)
    clock.move(8.0)
    with meter.measure_transfer(50):
        clock.move(0.5)
    assert meter.end_step() == (450, 7.5)


def test_a_step_without_transfers_raises_the_estimate():
    clock = MovedClock()
    meter = BandwidthMeter(clock)
    assert meter.bytes_per_s == math.inf
    with meter.measure_transfer(1000):
        clock.move(2.0)
    assert meter.bytes_per_s == 500.0
    meter.end_step()
    assert meter.bytes_per_s == 500.0
    assert meter.end_step() == (0, 0.0)
    assert meter.bytes_per_s == 500.0 * STALE_GROWTH_FACTOR


def test_a_transfer_that_fails_takes_time_and_moves_nothing():
    clock = MovedClock()
    meter = BandwidthMeter(clock)

    def fail() -> None:
        clock.move(2.0)
        raise OSError

    with pytest.raises(OSError), meter.measure_transfer(1000):
        fail()
    assert meter.end_step() == (0, 2.0)
