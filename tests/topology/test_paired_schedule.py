"""Rows of pairs: all work, once, in an order that ends. The V is torch's."""

import pytest

from moefold.config.base.pipeline_actions import Action, find_deadlock, one_per_slot
from moefold.planner.cost_model.block import CostItem
from moefold.planner.simulator.simulate import StageSegments, simulate
from moefold.topology.schedules import schedule_rows

SHAPES = [(1, 1), *((pp, chunks) for pp in (2, 3, 4, 8) for chunks in (1, 2, 3))]


@pytest.mark.parametrize(("pp", "chunks"), SHAPES)
def test_every_number_of_micro_batches_ends_with_all_work_done(pp, chunks):
    schedule = "1f1b" if chunks == 1 else "interleaved"
    for count in range(2, 26):
        if chunks > 1 and count % max(1, count // pp):
            continue
        rows = schedule_rows(schedule, pp, chunks, count, overlap=True)
        assert find_deadlock(rows) is None, count
        for rank, row in enumerate(rows):
            mine = [str(action) for slot in row for action in slot]
            stages = range(rank, pp * chunks, pp)
            assert sorted(mine) == sorted(
                f"{stage}{kind}{i}" for stage in stages for kind in "FB" for i in range(count)
            )
        # The rank with the last stage is least ahead: all but its first passes, and its last, go in pairs.
        ahead = 1 if chunks == 1 else (chunks - 1) * (count // max(1, count // pp)) + 1
        assert sum(len(slot) == 2 for slot in rows[-1]) == chunks * count - ahead > 0


@pytest.mark.parametrize("pp", [2, 3, 4, 5])
def test_dualpipev_equals_the_schedule_of_torch(pp):
    from torch.distributed.pipelining.schedules import ScheduleDualPipeV

    for count in range(2 * pp, 4 * pp + 2):
        rows = schedule_rows("dualpipev", pp, 2, count, overlap=True)
        assert find_deadlock(rows) is None, count
        for rank, row in enumerate(rows):
            theirs = ScheduleDualPipeV.__new__(ScheduleDualPipeV)
            theirs.pp_group_size, theirs._n_microbatches = pp, count
            words = [f"({slot[0]};{slot[1]})OVERLAP_F_B" if len(slot) == 2 else str(slot[0]) for slot in row]
            assert words == [str(action) for action in theirs._calculate_single_rank_operations(rank)], (count, rank)


def test_hand_worked_rows():
    rows = schedule_rows("1f1b", 2, 1, 5, overlap=True)
    first, last = ([" & ".join(map(str, slot)) for slot in row] for row in rows)
    assert first == ["0F0", "0F1", "0F2", "0F3 & 0B0", "0F4 & 0B1", "0B2", "0B3", "0B4"]
    assert last == ["1F0", "1F1 & 1B0", "1F2 & 1B1", "1F3 & 1B2", "1F4 & 1B3", "1B4"]


def test_a_pair_whose_halves_need_each_other_is_found():
    slot = (Action(0, "F", 0), Action(0, "B", 0))
    assert find_deadlock([(slot,)]) == (0, slot)


def test_plain_1f1b_in_pairs_is_no_faster_than_one_after_the_other():
    """Why a rank must be further ahead: with the rows of plain 1F1B, neighbours would take turns."""

    def span(ahead: int) -> float:
        rows = []
        for rank in range(2):
            forward, backward = ([Action(rank, kind, i) for i in range(16)] for kind in "FB")
            first = ahead * (1 - rank) + 1
            pairs = zip(forward[first:], backward, strict=False)
            rows.append((*one_per_slot(forward[:first]), *pairs, *one_per_slot(backward[-first:])))
        second = (CostItem("work", 1.0),)
        work = StageSegments(forward=second, backward=second, input_gradient=(), weight_gradient=())
        return simulate(rows, [work, work]).span_s

    assert span(2) < 0.8 * span(1)
