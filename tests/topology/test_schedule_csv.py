"""Schedules of a CSV file are read and checked, and one that cannot run is refused."""

import pytest

from moefold.config.base.pipeline_actions import Action
from moefold.config.load import config_from_dict
from moefold.config.sections.parallel import ParallelConfig
from moefold.errors import ConfigError
from moefold.planner.cost_model.block import CostItem
from moefold.planner.simulator.simulate import StageSegments, simulate
from moefold.topology.schedule_file import read_schedule
from moefold.topology.schedules import stage_ranks
from moefold.train.machine_checks import check_machine

ONE_F_ONE_B = "0F0,0F1,,0B0,0B1\n,1F0,1B0,1F1,1B1\n"
SPLIT = "0F0,0F1,,0I0,0I1,0W0,0W1\n,1F0,1I0,1F1,1I1,1W0,1W1\n"
V_SHAPE = "0F0,,,3F0,3B0,,,0B0\n,1F0,2F0,,,2I0,1I0,1W0,2W0\n"


@pytest.fixture
def read(tmp_path):
    def call(text: str, pp: int = 2, virtual_stages: int = 1, num_micro_batches: int | None = None):
        path = tmp_path / "schedule.csv"
        path.write_text(text)
        return read_schedule(str(path), pp, virtual_stages, num_micro_batches)

    return call


@pytest.mark.parametrize("text", [ONE_F_ONE_B, SPLIT])
def test_rows_are_read_in_order(read, text):
    rows, _ = read(text)
    assert ",".join(str(action) for (action,) in rows[0]) == text.splitlines()[0].replace(",,", ",")


def test_the_file_says_where_stages_stand(read):
    assert read(V_SHAPE, virtual_stages=2)[1] == (0, 1, 1, 0)


def test_overlapped_work_is_work_in_order(read):
    text = "0F0,(0F1;0B0)OVERLAP_F_B,0B1\n1F0,1B0,1F1,1B1\n"
    assert [str(action) for (action,) in read(text)[0][0]] == ["0F0", "0F1", "0B0", "0B1"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0,0B0\n", "has 1 rows, and parallel.pp=2"),
        ("0F0,0X0\n1F0,1B0\n", "row 1, cell 2: '0X0' is not an action"),
        ("0F0,0B0\n1F0,0B0\n", "stage 0 is on row 1 and, with 0B0, on row 2"),
        ("0F0,0B0\n2F0,2B0\n", "has the stages \\[0, 2\\]"),
        ("0F0,0F0,0B0\n1F0,1B0\n", "0F0 occurs twice"),
        ("0F0,0B0\n1F0,1I0\n", "stage 1 does F, I with micro-batch 0"),
        ("0F0,0B0,0I0,0W0\n1F0,1B0\n", "stage 0 does F, B, I, W with micro-batch 0"),
        ("0F0,0B0,0F2,0B2\n1F0,1B0,1F2,1B2\n", "stage 0 does nothing with micro-batch 1"),
        ("0B0,0F0\n1F0,1B0\n", "rank 0 waits before 0B0"),
        ("0F0,0W0,0I0\n1F0,1B0\n", "rank 0 waits before 0W0"),
        ("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n", "rank 0 waits before 0B0"),
    ],
)
def test_schedules_that_cannot_run_are_refused(read, text, message):
    with pytest.raises(ConfigError, match=message):
        read(text)


def test_ranks_have_equally_many_stages(read):
    with pytest.raises(ConfigError, match="gives the ranks \\[3, 1\\] stages"):
        read("0F0,1F0,2F0,2B0,1B0,0B0\n3F0,3B0\n", virtual_stages=2)


def test_the_file_is_for_the_micro_batches_of_the_batch(read):
    with pytest.raises(ConfigError, match="is for 2 micro-batches, and the batch gives each data-parallel rank 4"):
        read(SPLIT, num_micro_batches=4)


def test_the_machine_check_reads_the_file(tmp_path):
    recipe = {
        "run": {"dir": str(tmp_path / "run")},
        "parallel": {"world_size": 2, "pp": 2, "schedule": {"kind": "csv", "path": str(tmp_path / "none.csv")}},
    }
    with pytest.raises(ConfigError, match="none.csv' cannot be read: No such file or directory"):
        check_machine(config_from_dict(recipe))


def test_the_machine_check_refuses_an_order_that_the_loss_cannot_count(tmp_path):
    (tmp_path / "swapped.csv").write_text("0F0,0F1,0B1,0B0\n1F1,1B1,1F0,1B0\n")
    recipe = {
        "run": {"dir": str(tmp_path / "run")},
        "parallel": {"world_size": 2, "pp": 2, "schedule": {"kind": "csv", "path": str(tmp_path / "swapped.csv")}},
        "train": {"micro_batch_size": 1, "global_batch_size": 2},
        "moe": {"aux_loss": 0.01, "aux_kind": "global_batch"},
    }
    with pytest.raises(ConfigError, match="parallel.schedule='csv' runs 1F1 before 1F0, and moe.aux_kind='global_"):
        check_machine(config_from_dict(recipe))


def test_time_passes_as_order_and_needs_allow(read):
    second = (CostItem("work", 1.0),)
    work = StageSegments(forward=second, backward=2 * second, input_gradient=second, weight_gradient=second)

    def span_s(text: str) -> float:
        return simulate(read(text)[0], [work, work]).span_s

    # Two micro-batches of 3 s, and (p-1) of them to fill and drain.
    assert span_s(ONE_F_ONE_B) == 9.0
    assert span_s(SPLIT) < 9.0


def test_needs_follow_the_chain_rule():
    assert Action(1, "F", 2).consumes(3) == ((0, "F", 2),)
    assert Action(1, "B", 2).consumes(3) == ((1, "F", 2), (2, "I", 2))
    assert Action(2, "I", 2).consumes(3) == ((2, "F", 2),)
    assert Action(1, "W", 2).consumes(3) == ((1, "I", 2),)


@pytest.mark.parametrize(
    ("schedule", "chunks", "ranks"),
    [("1f1b", 1, (0, 1, 2)), ("interleaved", 2, (0, 1, 2, 0, 1, 2)), ("zbv", 2, (0, 1, 2, 2, 1, 0))],
)
def test_schedules_place_their_stages(schedule, chunks, ranks):
    assert stage_ranks(ParallelConfig(world_size=3, pp=3, schedule=schedule, virtual_stages=chunks)) == ranks
