"""The simulator against closed forms, against conservation laws and against a naive simulation of its own kind."""

import math
import random
from itertools import pairwise

import pytest

from moefold.config.sections.parallel import ParallelConfig
from moefold.config.sections.train import TrainConfig
from moefold.planner.cost_model.block import CostItem
from moefold.planner.cost_model.bubble import bubble_s
from moefold.planner.simulator.simulate import Noise, StageSegments, StepTail, simulate
from moefold.planner.simulator.timeline import COMMUNICATION, COMPUTE, SEND
from moefold.topology.schedules import schedule_rows
from moefold.validate.pipeline import validate_micro_batch_count
from tests.planner import naive_pipeline
from tests.slow import slow

SCHEDULES = [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 3), ("zero-bubble", 1)]
SCHEDULES += [("zero-bubble", 2), ("zbv", 2), ("dualpipev", 2)]


def stage(forward: float, inputs: float, weights: float, send: float = 0.0) -> StageSegments:
    parts = [(CostItem("attention", seconds),) for seconds in (forward, inputs + weights, inputs, weights)]
    return StageSegments(
        forward=parts[0], backward=parts[1], input_gradient=parts[2], weight_gradient=parts[3], p2p_s=send
    )


def legal_counts(schedule: str, pp: int, chunks: int, most: int) -> list[int]:
    found = []
    for count in range(pp, most + 1):
        parallel = ParallelConfig(world_size=pp, pp=pp, schedule=schedule, virtual_stages=chunks)
        if not list(validate_micro_batch_count(parallel, TrainConfig(global_batch_size=count))):
            found.append(count)
    return found


def play(schedule, pp, chunks, count, work, **options):
    return simulate(schedule_rows(schedule, pp, chunks, count), [work] * (pp * chunks), **options)


@pytest.mark.parametrize("pp", [2, 4, *slow([(8,)])])
@pytest.mark.parametrize("rounds", [2, 4])
@pytest.mark.parametrize(("f", "i", "w"), [(2, 2, 2), (2, 3, 1), (3, 4, 2)])
def test_bubbles_equal_the_papers(pp, rounds, f, i, w):
    m, total = rounds * pp, f + i + w
    work = stage(f, i, w)
    assert play("gpipe", pp, 1, m, work).bubble == pytest.approx((pp - 1) / m, rel=1e-12)
    assert play("1f1b", pp, 1, m, work).bubble == pytest.approx((pp - 1) / m, rel=1e-12)
    for v in (2, 3):
        assert play("interleaved", pp, v, m, work).bubble == pytest.approx((pp - 1) / (m * v), rel=1e-12)
    zero_bubble = (pp - 1) * (f + i - w) / (m * total)
    for v in (1, 2, 3):
        assert play("zero-bubble", pp, v, m, work).bubble == pytest.approx(zero_bubble / v, rel=1e-12)
    if f == i == w:
        assert play("zbv", pp, 2, m, work).bubble == pytest.approx(0.0, abs=1e-12)
        dualpipev = (pp - 1) * (f + 2 * i - w) / (m * 2 * total)
        assert play("dualpipev", pp, 2, m, work).bubble == pytest.approx(dualpipev, rel=1e-12)


@pytest.mark.parametrize("chunks", [1, 2, 3, 7])
@pytest.mark.parametrize("pp", [2, 4, *slow([(8,)])])
def test_the_priced_bubble_of_zero_bubble_equals_the_simulated_one(pp, chunks):
    for count in range(1, 2 * pp + 1):
        total_s = play("zero-bubble", pp, chunks, count, stage(2, 2, 2)).total_s
        priced = bubble_s(
            2.0 * chunks, 4.0 * chunks, 2.0 * chunks, pp=pp, vpp=chunks, num_micro_batches=count, schedule="zero-bubble"
        )
        assert priced == pytest.approx(total_s - 6 * chunks * count, rel=1e-12, abs=1e-9)


def test_dualpipev_with_unequal_times_is_below_its_form():
    # The table of docs/pipeline.md: the form says 0.219, and a simulation of torch's own rows 0.198.
    assert round(play("dualpipev", 4, 2, 8, stage(2, 3, 1)).bubble, 3) == 0.198


@pytest.mark.parametrize("pp", [2, 4, 8])
def test_the_span_of_1f1b_and_gpipe_counts_the_messages_on_the_way_in_and_out(pp):
    m, f, b, send = 4 * pp, 3.0, 6.0, 0.25
    span = play("gpipe", pp, 1, m, stage(f, 4.0, 2.0, send)).span_s
    assert span == pytest.approx((m + pp - 1) * (f + b) + 2 * (pp - 1) * send)
    # The slowest message paces the pipeline where it takes longer than the work.
    slow = play("gpipe", pp, 1, m, stage(f, 4.0, 2.0, 100.0)).span_s
    assert slow == pytest.approx(2 * ((m - 1) * 100.0) + 2 * (pp - 1) * 100.0 + pp * (f + b), rel=0.05)


@pytest.mark.parametrize(("pp", "count"), [(4, 8), (8, 16), (3, 9), (4, 32)])
def test_ranks_hold_as_many_micro_batches_as_the_papers_say(pp, count):
    def held(schedule: str, chunks: int) -> list[int]:
        timeline = play(schedule, pp, chunks, count, stage(2, 2, 2))
        return [timeline.max_in_flight(rank) for rank in range(pp)]

    assert held("gpipe", 1) == [count] * pp
    assert held("1f1b", 1) == [min(count, pp - rank) for rank in range(pp)]
    # arXiv:2104.04473: v-1 rounds and a warm-up that counts twice.
    for v in (2, 3):
        assert held("interleaved", v) == [min(count * v, (v - 1) * pp + 2 * (pp - 1 - r) + 1) for r in range(pp)]
    # arXiv:2401.10241 tab. 2: ZB-H1 keeps the peak of 1F1B's first rank, p, and ZB-V the same in halves.
    assert max(held("zero-bubble", 1)) == pp
    assert held("zbv", 2) == [2 * pp] * pp
    # arXiv:2412.19437 tab. 2: DualPipe keeps PP+1, here in halves.
    assert max(held("dualpipev", 2)) == 2 * pp + 1


def random_stages(draw: random.Random, num_stages: int, pieces: int) -> list[StageSegments]:
    def chain() -> tuple[CostItem, ...]:
        kinds = [draw.choice(["", "", "_comm"]) for _ in range(draw.randint(1, pieces))]
        return tuple(CostItem(f"part {i}{kind}", draw.randint(1, 9)) for i, kind in enumerate(kinds))

    takes_time = draw.random() < 0.7
    return [
        StageSegments(
            forward=chain(),
            backward=chain(),
            input_gradient=chain(),
            weight_gradient=chain(),
            p2p_s=draw.randint(1, 6) if takes_time else 0,
        )
        for _ in range(num_stages)
    ]


def random_case(seed: int, overlap: bool):
    draw = random.Random(seed)
    schedule, chunks = draw.choice([SCHEDULES[i] for i in (1, 2, 3, 7)] if overlap else SCHEDULES)
    pp = draw.randint(2, 6)
    count = draw.choice(legal_counts(schedule, pp, chunks, 3 * pp))
    rows = schedule_rows(schedule, pp, chunks, count, overlap=overlap)
    return draw, rows, pp * chunks, (schedule, pp, chunks, count)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("seed", range(20))
def test_random_machines_equal_a_naive_simulation(seed, overlap):
    draw, rows, num_stages, name = random_case(seed, overlap)
    stages = random_stages(draw, num_stages, 4)
    timeline = simulate(rows, stages, overlap=overlap)
    pieces, messages = naive_pipeline.run(rows, stages, overlap=overlap)
    mine = sorted((e.rank, e.stream, str(e.action), e.start_s, e.end_s) for e in timeline.events if e.stream != SEND)
    assert mine == sorted((r, stream, str(action), start, end) for r, stream, action, start, end in pieces), name
    sent = sorted((event.rank, event.peer, event.end_s) for event in timeline.events if event.stream == SEND)
    # Messages that take no time leave no event.
    assert sent == (sorted(messages) if stages[0].p2p_s else [])


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("seed", range(10))
def test_every_action_is_done_once_and_no_stream_does_two_things(seed, overlap):
    draw, rows, num_stages, _ = random_case(1000 + seed, overlap)
    stages = random_stages(draw, num_stages, 3)
    disturbance = Noise(slowdown_by_rank={0: 1.3}, jitter=0.2, seed=seed)
    timeline = simulate(rows, stages, overlap=overlap, noise=disturbance)
    for rank, row in enumerate(rows):
        done = [action for action, _ in timeline.actions(rank)]
        assert sorted(map(str, done)) == sorted(str(action) for slot in row for action in slot)
        for stream in (COMPUTE, COMMUNICATION):
            for before, after in pairwise(timeline.events_of(rank, stream)):
                assert before.end_s <= after.start_s + 1e-9
        for peer in range(len(rows)):
            sends = [event for event in timeline.events_of(rank, SEND) if event.peer == peer]
            for before, after in pairwise(sends):
                assert before.end_s <= after.start_s + 1e-9
    spans = {action: span for rank in range(len(rows)) for action, span in timeline.actions(rank)}
    by_key = {(a.stage, "I" if a.kind == "B" else a.kind, a.micro_batch): span for a, span in spans.items()}
    for action, (start, _) in spans.items():
        for need in action.consumes(num_stages):
            assert by_key[need][1] <= start + 1e-9
    work = [sum(e.end_s - e.start_s for e in timeline.events_of(rank, COMPUTE)) for rank in range(len(rows))]
    for rank, row in enumerate(rows):
        planned = 0.0
        for action in (action for slot in row for action in slot):
            pieces = [p for p in stages[action.stage].segments(action.kind) if not p.is_comm]
            planned += disturbance.slowdown(rank, action) * sum(piece.seconds for piece in pieces)
        assert work[rank] == pytest.approx(planned)


def test_overlap_hides_the_exchange_of_one_micro_batch_under_the_other():
    chain = (CostItem("attention", 2.0), CostItem("ep_comm", 2.0), CostItem("experts", 2.0))
    work = StageSegments(forward=chain, backward=chain + chain, input_gradient=chain, weight_gradient=chain)
    plain = simulate(schedule_rows("interleaved", 2, 2, 8), [work] * 4)
    hidden = simulate(schedule_rows("interleaved", 2, 2, 8, overlap=True), [work] * 4, overlap=True)
    # Rank 0 exchanges 16 times forward and 32 times backward, 2 each.
    assert plain.exposed_s(0) == 96.0
    # 11 passes are not in pairs each way; in a pair of the last rank of the warm-up all three exchanges hide.
    assert hidden.exposed_s(0) < plain.exposed_s(0) / 2
    assert hidden.span_s < 0.85 * plain.span_s
    compute = [sum(e.end_s - e.start_s for e in t.events_of(0, COMPUTE)) for t in (plain, hidden)]
    assert compute[0] == compute[1]
    assert hidden.work_s(0) == pytest.approx(compute[1] + hidden.exposed_s(0))


def test_an_uneven_pipeline_goes_at_the_pace_of_its_slowest_stage():
    stages = [stage(1, 1, 1), stage(2, 2, 2), stage(1, 1, 1), stage(1, 1, 1)]
    timeline = simulate(schedule_rows("1f1b", 4, 1, 64), stages)
    # Rank 1 works 64*6. Before that rank 0 goes forward (1). Its first three passes end at 7, and the gradients that it
    # waits for come at 9 (2). After it, rank 0 goes backward (2).
    assert timeline.span_s == pytest.approx(1 + 2 + 64 * 6 + 2)
    assert timeline.idle_s(1) == pytest.approx(5)
    assert timeline.idle_s(0) == pytest.approx(64 * 3 + 5)


def test_a_straggler_holds_everyone_up_and_jitter_is_the_same_every_time():
    rows, stages = schedule_rows("1f1b", 4, 1, 32), [stage(1, 1, 1)] * 4
    ideal = simulate(rows, stages)
    late = simulate(rows, stages, noise=Noise(slowdown_by_rank={2: 1.5}))
    # Two forward passes before it, 1.5 of waiting for rank 3 behind its own two, two backward passes after it.
    assert late.span_s == pytest.approx(2 + 1.5 + 32 * 4.5 + 4)
    assert late.work_s(2) == pytest.approx(1.5 * ideal.work_s(2))
    assert late.work_s(1) == pytest.approx(ideal.work_s(1))
    runs = [simulate(rows, stages, noise=Noise(jitter=0.1, seed=seed)) for seed in (1, 1, 2)]
    assert runs[0].events == runs[1].events
    assert runs[0].events != runs[2].events
    assert runs[0].span_s > ideal.span_s
    factors = [
        math.log((event.end_s - event.start_s) / (1 if event.action.kind == "F" else 2)) for event in runs[2].events
    ]
    mean = sum(factors) / len(factors)
    assert mean == pytest.approx(0.0, abs=0.03)
    assert math.sqrt(sum((x - mean) ** 2 for x in factors) / len(factors)) == pytest.approx(0.1, rel=0.15)


def test_a_step_ends_with_gradients_and_an_update_that_begins_everywhere_at_once():
    timeline = play("1f1b", 4, 1, 8, stage(1, 1, 1), tail=StepTail(gradients_s=2.0, optimizer_s=0.5))
    assert timeline.total_s == pytest.approx(timeline.span_s + 2.5)
    updates = [event for event in timeline.events if event.part == "optimizer"]
    assert {event.start_s for event in updates} == {timeline.span_s + 2.0}
    assert timeline.exposed_s(3) == 2.0
    assert play("1f1b", 4, 1, 8, stage(1, 1, 1)).total_s == timeline.span_s


def test_an_order_that_never_ends_is_found():
    rows = list(schedule_rows("1f1b", 2, 1, 2))
    rows[1] = rows[1][::-1]
    with pytest.raises(ValueError, match="deadlock: pipeline rank 0 waits before 0B0"):
        simulate(rows, [stage(1, 1, 1)] * 2)
