"""The simulator plays the times that the cost model prices."""

from dataclasses import replace

import pytest

from moefold.cost.hardware import load_device
from moefold.cost.stage_balance import plan_stages
from moefold.planner.cost_model.step import CostModel
from moefold.planner.cost_model.workload import TrainingWorkload
from moefold.planner.mapping import ParallelMapping
from moefold.planner.model_spec import model_spec_from_config
from moefold.planner.simulator.simulate import chunks_of_stages, simulate_mapping, stage_segments
from moefold.planner.simulator.timeline import COMMUNICATION, COMPUTE, Timeline, merge_spans, subtract_spans
from moefold.planner.stage_splitter import placed_ranks
from moefold.recipe import load_config

CLOSED_FORMS = [
    ("gpipe", 1),
    ("1f1b", 1),
    ("1f1b", 7),
    ("zero-bubble", 1),
    ("zero-bubble", 7),
    ("zbv", 2),
    ("dualpipev", 2),
]
RECOMPUTE = [(), ("core_attention",), ("layer",)]


@pytest.fixture(scope="module")
def pricer() -> CostModel:
    return priced_model()


def priced_model(*changes: str) -> CostModel:
    shape = model_spec_from_config(load_config(None, ["model.preset=mixtral-8x22b", *changes]).model)
    return CostModel(shape, load_device("h100"), TrainingWorkload(seq_len=4096, global_batch_size=256))


def folded(**changes) -> ParallelMapping:
    return replace(ParallelMapping(tp=2, dp=8, pp=8, ep=8, edp=2), **changes)


@pytest.mark.parametrize("recompute", RECOMPUTE)
@pytest.mark.parametrize(("schedule", "vpp"), [("1f1b", 1), ("1f1b", 7), ("zbv", 2)])
def test_stages_take_as_long_as_they_are_priced(pricer, schedule, vpp, recompute):
    mapping = folded(schedule=schedule, vpp=vpp, recompute=recompute)
    works = stage_segments(pricer, mapping)
    assert len(works) == 8 * vpp
    chunks = pricer.split(placed_ranks(schedule, 8, vpp))
    layer = pricer.layer_time(0, mapping)
    head = pricer.head_and_loss_s(mapping)
    for work, chunk in zip(works, chunks, strict=True):
        (count,) = chunk.kind_counts
        forward, backward, inputs, weights = (sum(piece.seconds for piece in work.segments(kind)) for kind in "FBIW")
        assert forward == pytest.approx(count * layer.forward_s + chunk.has_loss * head[0], rel=1e-12)
        assert backward == pytest.approx(count * layer.backward_s + chunk.has_loss * head[1], rel=1e-12)
        assert weights == pytest.approx(count * layer.wgrad_s, rel=1e-12)
        assert inputs + weights == pytest.approx(backward, rel=1e-12)


@pytest.mark.parametrize(("schedule", "vpp"), CLOSED_FORMS)
def test_a_simulated_step_takes_as_long_as_the_closed_form_says(schedule, vpp):
    """For equal ranks, which the closed forms are for: without a loss that makes one rank busier."""
    pricer = priced_model("model.vocab_size=256")
    mapping = folded(schedule=schedule, vpp=vpp)
    assert simulate_mapping(pricer, mapping).total_s == pytest.approx(pricer.step_time(mapping).total_s, rel=0.03)


def _shown_exchange_s(timeline: Timeline) -> float:
    """Sum only the experts' exchange: overlap also gathers all parameters before the first pass, unhidden."""
    exchange = [(e.start_s, e.end_s) for e in timeline.events_of(0, COMMUNICATION) if e.part == "ep_comm"]
    compute = merge_spans((e.start_s, e.end_s) for e in timeline.events_of(0, COMPUTE))
    return sum(end - start for start, end in subtract_spans(merge_spans(exchange), compute))


def test_overlap_hides_most_of_the_exchange(pricer):
    plain = simulate_mapping(pricer, folded(schedule="interleaved", vpp=7))
    hidden = simulate_mapping(pricer, folded(schedule="interleaved", vpp=7, overlap=True))
    assert _shown_exchange_s(hidden) < 0.5 * _shown_exchange_s(plain)
    assert hidden.total_s < plain.total_s


def test_without_a_pipeline_nothing_waits(pricer):
    mapping = folded(dp=64, pp=1, edp=16, mbs=1)
    timeline = simulate_mapping(pricer, mapping)
    assert timeline.num_ranks == 1
    assert timeline.bubble == pytest.approx(0.0, abs=1e-9)


def test_the_stages_of_a_recipe_stand_where_its_layout_has_them(tmp_path):
    words = ["model.layers=2 x (dense, 2 moe)", "model.mtp_layers=1"]
    words += ["parallel.world_size=4", "parallel.pp=4", "parallel.pipeline_layout=E|tt|t*3|tmL"]
    cfg = load_config(None, [*words, "train.global_batch_size=8"])
    shape = model_spec_from_config(cfg.model)
    chunks = chunks_of_stages(plan_stages(cfg), shape)
    dense, moe = shape.layers[0], shape.layers[1]
    counts = [(chunk.kind_counts[dense], chunk.kind_counts[moe]) for chunk in chunks]
    assert counts == [(0, 0), (1, 1), (1, 2), (0, 2)]
    assert [chunk.has_embedding for chunk in chunks] == [True, False, False, False]
    assert [chunk.has_loss for chunk in chunks] == [False, False, False, True]
    pricer = CostModel(shape, load_device("h100"), TrainingWorkload(seq_len=64, global_batch_size=8))
    timeline = simulate_mapping(pricer, ParallelMapping(pp=4), chunks=chunks)
    assert timeline.work_s(0) == 0
    assert timeline.work_s(2) > timeline.work_s(1) > 0
