"""The record of what a rank does, which other threads and processes read."""

import sys
import time
from collections import Counter

import pytest

from moefold.comm.flight_recorder import FlightRecorder, FlightSnapshot, decode_snapshot, format_ranks, read_snapshot
from tests.moved_clock import MovedClock


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        ([3], "rank 3"),
        ([2, 3], "ranks 2, 3"),
        ([0, 1, 2, 3], "ranks 0-3"),
        ([0, 2, 4], "ranks 0, 2, 4"),
        (range(0, 64, 4), "ranks 0, 4 ... 60"),
    ],
)
def test_ranks_are_formatted(ranks, words):
    assert format_ranks(ranks) == words


def flown(**kwargs: object) -> FlightRecorder:
    record = FlightRecorder(5.0, **kwargs)
    ep, tp = record.add_group("ep", (0, 2)), record.add_group("tp", (0, 1))
    record.begin_step(7, "loading data")
    record.set_phase("forward of micro-batch 1")
    for group, shape in ((ep, (4, 8)), (tp, ()), (ep, (2, 3, 4))):
        record.record_collective("all_to_all", group, shape)
    return record


def test_description_of_a_snapshot(tmp_path):
    record = flown()
    seen = record.snapshot()
    assert (seen.step, seen.phase, seen.phase_number) == (7, "forward of micro-batch 1", 2)
    assert (seen.collective, seen.group, seen.shape) == ("all_to_all", "ep (ranks 0, 2)", (2, 3, 4))
    assert seen.counts == {"ep (ranks 0, 2)": 2, "tp (ranks 0, 1)": 1}
    assert abs(seen.moved_s - time.time()) < 1
    assert FlightSnapshot.from_json(seen.to_json()) == seen
    record.begin_step(8, "loading data")
    assert (record.snapshot().step, record.snapshot().phase_number) == (8, 1)


def test_a_phase_and_a_collective_end_the_idle_time():
    record = flown()
    record.clock = clock = MovedClock(100.0)
    record.set_phase("optimizer")
    clock.move(3.0)
    assert record.idle_s() == 3.0
    record.set_phase("evaluation")
    assert record.idle_s() == 0.0
    clock.move(2.0)
    record.record_collective("all_reduce", 1, ())
    assert record.idle_s() == 0.0


def test_another_process_can_read_the_file(tmp_path):
    file = tmp_path / "record"
    assert read_snapshot(file) is None
    early = FlightRecorder(5.0, file)
    assert read_snapshot(file).phase == early.snapshot().phase == "starting"
    seen, said = read_snapshot(file), flown(file=file).snapshot()
    seen = read_snapshot(file)
    for field in ("step", "phase", "phase_number", "collective", "group", "shape"):
        assert getattr(seen, field) == getattr(said, field)
    assert seen.moved_s == pytest.approx(said.moved_s, abs=0.1)


def test_invalid_record_is_ignored():
    assert decode_snapshot(b"") is None
    assert decode_snapshot(bytes(1024)) is None


def test_an_update_is_a_few_calls(tmp_path):
    """A step has hundreds of collectives: each reads the clock, encodes two names and writes one event."""
    record = FlightRecorder(5.0, tmp_path / "record")
    group = record.add_group("ep", range(8))
    calls = Counter()
    sys.setprofile(lambda frame, event, argument: calls.update([event]))
    record.record_collective("all_to_all", group, (4096, 1024))
    sys.setprofile(None)
    # Python calls the method and the clock; C calls are the time, two names, the write, and setprofile itself.
    assert calls["call"] == 2
    assert calls["c_call"] <= 8
