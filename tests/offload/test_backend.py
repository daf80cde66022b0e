import math
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from moefold.offload.backend import STALE_GROWTH_FACTOR, BandwidthMeter


def _carry(pace: BandwidthMeter, num_bytes: int, seconds: float) -> None:
    with pace.measure_transfer(num_bytes):
        time.sleep(seconds)


def test_jobs_at_a_time_count_once():
    pace = BandwidthMeter()
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda _: _carry(pace, 100, 0.1), range(4)))
    num_bytes, busy_s = pace.end_step()
    assert num_bytes == 400
    assert 0.1 <= busy_s < 0.3


def test_an_old_measurement_is_believed_less():
    pace = BandwidthMeter()
    assert pace.bytes_per_s == math.inf
    _carry(pace, 1000, 0.05)
    pace.end_step()
    speed = pace.bytes_per_s
    assert 1000 / 0.2 < speed <= 1000 / 0.05
    assert pace.end_step() == (0, 0.0)
    assert pace.bytes_per_s == pytest.approx(speed * STALE_GROWTH_FACTOR)


def test_a_job_that_fails_carried_nothing():
    pace = BandwidthMeter()
    with pytest.raises(OSError), pace.measure_transfer(1000):
        raise OSError
    num_bytes, busy_s = pace.end_step()
    assert num_bytes == 0
    assert busy_s > 0
