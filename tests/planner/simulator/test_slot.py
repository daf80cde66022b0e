"""Ranks act together on paper exactly where they act together in the runtime."""

import pytest

from moefold.config.base.part import Part, make_part
from moefold.config.schema import Config
from moefold.config.sections.parallel import ParallelConfig
from moefold.config.sections.train import TrainConfig
from moefold.parts.schedule import CsvSchedule
from moefold.topology.schedules import runtime_slots, schedule_rows
from moefold.validate.pipeline import validate_micro_batch_count

SCHEDULES = [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 3), ("zero-bubble", 1)]
SCHEDULES += [("zero-bubble", 2), ("zbv", 2), ("dualpipev", 2)]


def config(schedule: str | Part, pp: int, chunks: int, count: int) -> Config:
    return Config(
        parallel=ParallelConfig(world_size=pp, pp=pp, virtual_stages=chunks, schedule=schedule),
        train=TrainConfig(global_batch_size=count),
    )


def spelled(rows) -> list[list[list[str]]]:
    return [[list(map(str, slot)) for slot in row] for row in rows]


@pytest.mark.parametrize("pp", [2, 3, 4, 8])
@pytest.mark.parametrize(("schedule", "chunks"), SCHEDULES)
def test_the_slots_equal_the_runtime(pp, schedule, chunks):
    compared = 0
    for count in range(1, 3 * pp + 2):
        cfg = config(schedule, pp, chunks, count)
        if not list(validate_micro_batch_count(cfg.parallel, cfg.train)):
            compared += 1
            assert schedule_rows(schedule, pp, chunks, count) == runtime_slots(cfg.model, cfg.parallel, cfg.train), (
                count
            )
    assert compared > pp


def test_the_slots_of_a_file_equal_the_runtime(tmp_path):
    path = tmp_path / "order.csv"
    path.write_text("0F0,0F1,0I0,0I1,0W0,0W1\n1F0,1I0,1F1,1I1,1W0,1W1\n")
    mine = schedule_rows(CsvSchedule(path=str(path)), 2, 1, 2)
    cfg = config(make_part("schedule", "csv", path=str(path)), 2, 1, 2)
    assert mine == runtime_slots(cfg.model, cfg.parallel, cfg.train)


def test_1f1b_with_several_stages_is_interleaved():
    assert schedule_rows("1f1b", 4, 2, 8) == schedule_rows("interleaved", 4, 2, 8)
    assert spelled(schedule_rows("1f1b", 1, 1, 2)) == [[["0F0"], ["0B0"], ["0F1"], ["0B1"]]]


@pytest.mark.parametrize(("schedule", "chunks"), [("1f1b", 1), ("1f1b", 2), ("interleaved", 2), ("dualpipev", 2)])
def test_pairs_are_of_a_forward_and_a_backward_pass_and_no_work_is_lost(schedule, chunks):
    rows = schedule_rows(schedule, 4, chunks, 8, overlap=True)
    kinds = {"".join(sorted(action.kind for action in slot)) for row in rows for slot in row}
    assert {"BF", "F", "B"} <= kinds <= {"BF", "F", "B", "I", "W"}
    stages = {action.stage for row in rows for slot in row for action in slot}
    done = sorted((a.stage, a.micro_batch) for row in rows for slot in row for a in slot if a.kind in "BW")
    assert done == [(stage, i) for stage in sorted(stages) for i in range(8)]
