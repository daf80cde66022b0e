"""The pipeline schedule of the package: equal to one rank, judged, searched and priced."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from moefold.config.base.part import Part
from moefold.config.base.pipeline_actions import find_deadlock
from moefold.config.schema import Config
from moefold.cost.auto_layout_memory import max_in_flight
from moefold.launch.rank_pool import WorkerPool
from moefold.planner.cost_model.block import CostItem
from moefold.planner.cost_model.bubble import bubble_s
from moefold.planner.search.constraints import MappingConstraints, Restriction
from moefold.planner.search.space import MappingSpace
from moefold.planner.simulator.simulate import StageSegments, simulate
from moefold.recipe import load_config
from moefold.topology.schedules import runtime_slots, schedule_rows
from moefold.verify.compare import compare_records, run_oracle
from moefold.verify.distributed_run import run_distributed
from tests.plugin.recipes import words
from tests.verify.oracle import TOLERANCE
from tests.verify.recipes import tiny, without_mapping

[EAGER] = words("parallel.schedule")


def scheduled(cfg: Config) -> Config:
    schedule = load_config(None, [EAGER]).parallel.schedule
    return replace(cfg, parallel=replace(cfg.parallel, schedule=schedule))


@pytest.mark.parity
def test_the_oracle_judges_it(pool: WorkerPool) -> None:
    cfg = scheduled(tiny(train={"global_batch_size": 8, "lr": 1e-2}, world_size=2, pp=2))
    assert find_deadlock(runtime_slots(cfg.model, cfg.parallel, cfg.train)) is None
    records = pool.run(2, run_distributed, cfg, 2)
    assert compare_records(run_oracle(without_mapping(cfg), 2), records)[0].error < TOLERANCE


def test_it_is_searched_where_the_recipe_names_it() -> None:
    for named in ([EAGER], []):
        cfg = load_config(None, ["model.preset=tiny", "parallel.world_size=2", "parallel.pp=2", *named])
        space = MappingSpace(MappingConstraints(cfg), Restriction({"pp": 2}))
        found = {run["schedule"] for fold, view in space.folds for run in space.sample_mappings(fold, view)}
        kinds = {schedule.kind if isinstance(schedule, Part) else schedule for schedule in found}
        assert ("eager" in kinds) == bool(named)
        assert "csv" not in kinds


def test_the_schedule_is_priced() -> None:
    """Compare memory in flight and idle time with 1F1B; warm-up adds a micro-batch to it and no time."""
    base = tiny(world_size=4, pp=4, model={"layers": 4}, train={"global_batch_size": 16})
    cfg = scheduled(base)
    count = cfg.num_micro_batches
    bubble = partial(bubble_s, pp=4, num_micro_batches=count, schedule=cfg.parallel.schedule)
    array = np.array([[1.0]])
    work = StageSegments(
        forward=(CostItem("work", 1.0),), backward=(CostItem("work", 2.0),), input_gradient=(), weight_gradient=()
    )
    timeline = simulate(schedule_rows(cfg.parallel.schedule, 4, 1, count), [work] * 4)
    priced = bubble(1.0, 2.0, 1.0, vpp=1), float(bubble(array, 2 * array, array, vpp=np.array([[1]]))[0, 0])
    assert max_in_flight(cfg, 4) == [count + 1 for count in max_in_flight(base, 4)] == [5, 4, 3, 2]
    idle = [*priced, timeline.span_s - 3.0 * count]
    assert idle == [bubble_s(1.0, 2.0, 1.0, pp=4, vpp=1, num_micro_batches=16, schedule="1f1b")] * 3
