import math
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from moefold.offload.pace import FORGETTING, Pace


def _carry(pace: Pace, num_bytes: int, seconds: float) -> None:
    with pace.carrying(num_bytes):
        time.sleep(seconds)


def test_jobs_at_a_time_count_once():
    pace = Pace()
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda _: _carry(pace, 100, 0.1), range(4)))
    num_bytes, busy_s = pace.take_step()
    assert num_bytes == 400
    assert 0.1 <= busy_s < 0.3


def test_an_old_measurement_is_believed_less():
    pace = Pace()
    assert pace.bytes_per_s == math.inf
    _carry(pace, 1000, 0.05)
    pace.take_step()
    speed = pace.bytes_per_s
    assert 1000 / 0.2 < speed <= 1000 / 0.05
    assert pace.take_step() == (0, 0.0)
    assert pace.bytes_per_s == pytest.approx(speed * FORGETTING)


def test_a_job_that_fails_carried_nothing():
    pace = Pace()
    with pytest.raises(OSError), pace.carrying(1000):
        raise OSError
    num_bytes, busy_s = pace.take_step()
    assert num_bytes == 0
    assert busy_s > 0
