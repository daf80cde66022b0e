"""Plans of messages: no rank deadlocks, each message is used once, and few are in memory whatever the batch."""

import random
from collections.abc import Iterator, Sequence

import pytest

from moefold.config.base.pipeline_actions import Action, SlotRow
from moefold.config.sections.parallel import ParallelConfig
from moefold.config.sections.train import TrainConfig
from moefold.cost.peak_candidates import StepSchedule
from moefold.topology.message_plan import (
    CHANNEL_CAPACITY,
    RankPlan,
    Receive,
    Release,
    Send,
    consumer,
    forward_rows,
    live_messages,
    plan_messages,
    received,
)
from moefold.topology.schedules import overlapped_schedules, schedule_named, schedule_rows
from moefold.validate.pipeline import validate_micro_batch_count
from tests.slow import slow

SHAPES = [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 3), ("interleaved", 7), ("zero-bubble", 1)]
SHAPES += [("zero-bubble", 2), ("zero-bubble", 3), ("zbv", 2), ("dualpipev", 2)]
SCHEDULE_SHAPES = [(name, chunks, False) for name, chunks in SHAPES]
SCHEDULE_SHAPES += [(name, chunks, True) for name, chunks in SHAPES if name in overlapped_schedules()]


def execute(plans: Sequence[RankPlan], num_stages: int) -> tuple[list[Action], list[int]]:
    """Run the plans with sends and receives that block until the other rank is at the same message.

    No back-end can wait for more: it may queue the messages of a pair of ranks, or of a rank, in the order of the plan,
    or let them pass each other. Returns the actions, and the operation at which each rank stopped.
    """
    at = [0] * len(plans)
    held: list[dict[tuple[int, str, int], str]] = [{} for _ in plans]
    done: list[Action] = []

    def is_met(rank: int, operation: Send | Receive) -> bool:
        other = plans[operation.peer]
        found = other[at[operation.peer]] if at[operation.peer] < len(other) else None
        wanted = Receive if isinstance(operation, Send) else Send
        return isinstance(found, wanted) and found.message == operation.message and found.peer == rank

    def run(rank: int) -> bool:
        operation = plans[rank][at[rank]]
        if isinstance(operation, Send):
            if not is_met(rank, operation):
                return False
            assert held[rank].get(operation.message) == "result"
            held[rank][operation.message] = "sent"
            held[operation.peer][operation.message] = "result"
            at[operation.peer] += 1
        elif isinstance(operation, Receive):
            return False
        elif isinstance(operation, Release):
            assert held[rank].pop(operation.message) == "sent"
        else:
            for action in operation:
                if (message := received(action, num_stages)) is not None:
                    assert held[rank].pop(message) == "result", action
            for action in operation:
                if consumer(action.produces, num_stages) is not None:
                    held[rank][action.produces] = "result"
            done.extend(operation)
        at[rank] += 1
        return True

    has_progress = True
    while has_progress:
        has_progress = False
        for rank, plan in enumerate(plans):
            while at[rank] < len(plan) and run(rank):
                has_progress = True
    return done, at


def assert_plan(rows: Sequence[SlotRow], stage_ranks: Sequence[int]) -> tuple[RankPlan, ...]:
    plans = plan_messages(rows, stage_ranks)
    done, at = execute(plans, len(stage_ranks))
    assert at == [len(plan) for plan in plans]
    assert sorted(map(str, done)) == sorted(str(action) for row in rows for slot in row for action in slot)
    for plan, row in zip(plans, rows, strict=True):
        assert [operation for operation in plan if isinstance(operation, tuple)] == list(row)
    return plans


def legal_counts(schedule: str, chunks: int, pp: int) -> Iterator[int]:
    for count in range(1, 4 * pp + 2):
        parallel = ParallelConfig(world_size=pp, pp=pp, schedule=schedule, virtual_stages=chunks)
        if not list(validate_micro_batch_count(parallel, TrainConfig(global_batch_size=count))):
            yield count


@pytest.mark.parametrize(("schedule", "chunks", "overlap"), SCHEDULE_SHAPES)
@pytest.mark.parametrize("pp", [2, 3, *slow([(5,)])])
def test_every_plan_ends_even_if_each_message_blocks_both_ranks(schedule, chunks, overlap, pp):
    ranks = schedule_named(schedule).stage_ranks(pp, chunks)
    counts = list(legal_counts(schedule, chunks, pp))
    assert len(counts) > pp
    for count in counts:
        if overlap and count == 1:
            continue
        rows = schedule_rows(schedule, pp, chunks, count, overlap=overlap)
        assert_plan(rows, ranks)
        assert_plan(forward_rows(rows), ranks)


def random_rows(generator: random.Random) -> tuple[list[SlotRow], list[int]]:
    """Rows in any order that ends, of stages in any place, as a file may have them."""
    pp = generator.randint(2, 4)
    chunks = generator.randint(1, 3)
    count = generator.randint(1, 6)
    ranks = [rank for rank in range(pp) for _ in range(chunks)]
    generator.shuffle(ranks)
    splits = generator.random() < 0.5
    pending = {
        Action(stage, kind, i)
        for stage in range(len(ranks))
        for kind in ("FIW" if splits else "FB")
        for i in range(count)
    }
    results: set[tuple[int, str, int]] = set()
    rows: list[list[tuple[Action, ...]]] = [[] for _ in range(pp)]
    favourite = generator.choice(["F", "I", "B", "W"])
    while pending:
        ready = sorted((a for a in pending if results.issuperset(a.consumes(len(ranks)))), key=str)
        action = generator.choice([a for a in ready if a.kind == favourite] or ready)
        pending.remove(action)
        results.add(action.produces)
        rows[ranks[action.stage]].append((action,))
    return list(map(tuple, rows)), ranks


def test_plans_of_files_in_any_order_end():
    generator = random.Random(5)
    for _ in range(100):
        assert_plan(*random_rows(generator))


def test_a_receive_behind_a_send_is_found():
    """The check fails for a plan whose ranks both send first, as a rank does that posts its receives late."""
    plans = [list(plan) for plan in plan_messages(schedule_rows("1f1b", 2, 1, 4), (0, 1))]
    at = next(i for i, found in enumerate(plans[0]) if isinstance(found, Receive))
    later = next(i for i in range(at, len(plans[0])) if isinstance(plans[0][i], Send))
    plans[0].insert(later, plans[0].pop(at))
    try:
        _, stopped = execute(list(map(tuple, plans)), 2)
    except (AssertionError, KeyError):
        return
    assert stopped != list(map(len, plans))


def test_a_deadlock_of_the_rows_is_reported():
    with pytest.raises(ValueError, match="deadlocks"):
        plan_messages(
            [((Action(0, "B", 0),), (Action(0, "F", 0),)), ((Action(1, "F", 0),), (Action(1, "B", 0),))], (0, 1)
        )


def test_hand_worked_plan():
    first, last = plan_messages(schedule_rows("1f1b", 2, 1, 2), (0, 1))
    f = [(0, "F", i) for i in range(2)]
    b = [(1, "I", i) for i in range(2)]
    own = [[(Action(stage, kind, i),) for i in range(2)] for stage in range(2) for kind in "FB"]
    assert first == (
        own[0][0], Send(f[0], 1), own[0][1], Release(f[0]), Send(f[1], 1), Receive(b[0], 1), own[1][0], Release(f[1]),
        Receive(b[1], 1), own[1][1],
    )  # fmt: skip
    assert last == (
        Receive(f[0], 0), own[2][0], Receive(f[1], 0), own[3][0], Send(b[0], 0), Release(b[0]), own[2][1], own[3][1],
        Send(b[1], 0), Release(b[1]),
    )  # fmt: skip
    # While the second forward pass runs, the first rank still has the sent tensor; then the last one does not need it.
    assert live_messages(first, 2, overlaps=False) == [0, 1, 1, 0]
    # The second input waits while the first backward pass runs.
    assert live_messages(last, 2, overlaps=False) == [0, 1, 0, 0]


def most_messages(schedule: str, chunks: int, pp: int, count: int, *, overlap: bool) -> list[int]:
    plans = plan_messages(
        schedule_rows(schedule, pp, chunks, count, overlap=overlap), schedule_named(schedule).stage_ranks(pp, chunks)
    )
    return [max(live_messages(plan, pp * chunks, overlaps=overlap)) for plan in plans]


@pytest.mark.parametrize(("schedule", "chunks", "overlap"), SCHEDULE_SHAPES)
@pytest.mark.parametrize("pp", [4, *slow([(2,)])])
def test_messages_in_memory_do_not_depend_on_the_micro_batches(schedule, chunks, overlap, pp):
    at_8, at_32, at_64 = (most_messages(schedule, chunks, pp, count, overlap=overlap) for count in (8, 32, 64))
    # Two rounds are too few for the largest number on each rank, but not on the rank that has most.
    assert max(at_8) == max(at_32)
    assert at_32 == at_64
    assert max(at_8) <= pp + 2


@pytest.mark.parametrize(("schedule", "chunks", "overlap"), SCHEDULE_SHAPES)
def test_the_shortest_equivalent_schedule_has_as_many_messages(schedule, chunks, overlap):
    shortest = StepSchedule(schedule, 8, chunks, 64, overlap).shortest_equivalent().num_micro_batches
    found = [most_messages(schedule, chunks, 8, count, overlap=overlap) for count in (shortest, 64)]
    assert found[0] == found[1]


def test_a_slow_stage_has_no_queue():
    """The second rank has two stages, so that it needs twice the time of the first one."""
    forward, backward = ([[Action(stage, kind, i) for stage in range(3)] for i in range(32)] for kind in "FB")
    first = [(passes[0],) for passes in (*forward, *backward)]
    last = [(action,) for passes in forward for action in passes[1:]]
    last += [(action,) for passes in backward for action in passes[:0:-1]]
    plans = assert_plan([tuple(first), tuple(last)], (0, 1, 1))
    waiting = most = 0
    for operation in plans[1]:
        if isinstance(operation, tuple):
            waiting -= operation[0].kind == "F" and operation[0].stage == 1
        waiting += isinstance(operation, Receive)
        most = max(most, waiting)
    assert most == CHANNEL_CAPACITY
