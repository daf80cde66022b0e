import time

import pytest

from moefold.comm.flight_recorder import FlightRecorder, FlightSnapshot, decode_snapshot, format_ranks, read_snapshot


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


def test_it_stands_still_until_something_begins():
    record = flown()
    time.sleep(0.05)
    assert record.idle_s() >= 0.05
    record.set_phase("optimizer")
    assert record.idle_s() < 0.05
    time.sleep(0.05)
    record.record_collective("all_reduce", 1, ())
    assert record.idle_s() < 0.05


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


def test_an_update_is_cheap(tmp_path):
    # A step of a hundred milliseconds has a hundred collectives or so: five microseconds each are half a percent.
    record = FlightRecorder(5.0, tmp_path / "record")
    group, shape = record.add_group("ep", range(8)), (4096, 1024)
    best_s = float("inf")
    for _ in range(5):
        started_s = time.perf_counter()
        for _ in range(1000):
            record.record_collective("all_to_all", group, shape)
        best_s = min(best_s, (time.perf_counter() - started_s) / 1000)
    assert best_s < 5e-6
