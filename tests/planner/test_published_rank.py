"""Where published mappings stand in the search: none is faster than the best found, and few are faster than they are.

The search prices the software of the source (Megatron-Core), not moefold. Run with -s for the table of
docs/cost-model.md.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from random import Random

import pytest

from benchmarks.published.models import load_published_model
from benchmarks.published.predictions import predict
from benchmarks.published.rows import BASELINES, PAPER, PublishedCase, parse_case
from moefold.config.schema import Config
from moefold.config.sections.parallel import ParallelConfig
from moefold.config.sections.run import RunConfig
from moefold.config.sections.train import TrainConfig
from moefold.cost.hardware import load_device
from moefold.planner.accuracy import SkipRowError, read_rows
from moefold.planner.cost_model.step import CostModel
from moefold.planner.cost_model.workload import TrainingWorkload
from moefold.planner.mapping import OFFLOADED_OPTIMIZER, ParallelMapping
from moefold.planner.memory.budget import MemoryModel
from moefold.planner.search.constraints import FOLDED, MappingConstraints, Restriction
from moefold.planner.search.memory_filter import MemoryFilter
from moefold.planner.search.search import MicroBatchChoice, Search, SearchTarget
from moefold.planner.search.space import HOST, MappingSpace, PipelineVariant
from moefold.units import GIB
from moefold.validate.config import check_config

SAMPLE, LEAST_SAMPLE = 6000, 100
"""Mappings that are drawn, and how many of them have to fit into memory."""
TABLE = Path(__file__).parent / "published" / "calibration.csv"


def cases() -> dict[str, PublishedCase]:
    """One case for each mapping of a model on some GPUs that moefold can run."""
    found: dict[str, PublishedCase] = {}
    for row in read_rows(TABLE):
        try:
            case = parse_case(row)
        except SkipRowError:
            continue
        m = case.mapping
        degrees = f"tp{m.tp}-cp{m.cp}-pp{m.pp}-ep{m.ep}-etp{m.etp}"
        name = f"{case.model}-{m.world_size}x{case.gpu}-{case.workload.precision}-{degrees}"
        is_baseline = row["source"].startswith(PAPER) and row["method"] in BASELINES
        if row["value"].upper() != "OOM" and not is_baseline and load_published_model(case.model).config is not None:
            found.setdefault(name, case)
    return found


CASES = cases()


def search_of(case: PublishedCase, workload: TrainingWorkload, mapping: ParallelMapping) -> Search:
    """Over the same GPUs, batch and software, with the memory that the published mapping needs by estimate: it did fit.

    A search within the device's memory would leave it out where the estimate is larger (`MAX_OVERESTIMATE`).
    """
    shape, w = load_published_model(case.model), workload
    assert shape.config is not None
    cfg = Config(
        run=RunConfig(device="cuda"),
        model=shape.config,
        parallel=ParallelConfig(world_size=case.mapping.world_size),
        train=TrainConfig(seq_len=w.seq_len, global_batch_size=w.global_batch_size),
    )
    # The offloads of a source are taken to be hidden, so all mappings may offload the same, and nothing else.
    parts = tuple(part for part in case.mapping.offload if part != OFFLOADED_OPTIMIZER)
    fixed = {"offload": parts, "moments": HOST if OFFLOADED_OPTIMIZER in case.mapping.offload else "none"}
    space = MappingSpace(MappingConstraints(cfg), Restriction(fixed, FOLDED))
    device = load_device(case.gpu)
    needed = MemoryModel(shape, w, device, cfg).estimate(mapping).total / GIB
    device = replace(device, memory_gib=max(device.memory_gib, needed * (1 + 1e-9)))
    memory = MemoryModel(shape, w, device, cfg)
    cost_model = CostModel(shape, device, w, memory.activation_memory)
    return Search(cost_model, MemoryFilter(space, memory))


def by_schedule(pipelines: Iterable[PipelineVariant]) -> list[list[PipelineVariant]]:
    groups = defaultdict(list)
    for pipeline in pipelines:
        groups[pipeline.schedule].append(pipeline)
    return list(groups.values())


def some_mappings(space: MappingSpace, count: int) -> Iterator[ParallelMapping]:
    """Legal mappings by chance, each as likely as any other."""
    chance = Random(0)
    for fold, view in chance.choices(space.folds, space.count_by_fold(), k=count):
        groups = [
            (size, dispatcher, overlap, alike, zeros)
            for size, pipelines in view.pipelines_by_mbs
            for alike in by_schedule(pipelines)
            for dispatcher, overlap in product(space.dispatchers(fold, size), (False, True))
            if (zeros := space.legal_zero_stages(fold, size, alike[0].schedule, dispatcher, overlap))
        ]
        numbers = [len(alike) * len(zeros) for *_, alike, zeros in groups]
        ((size, dispatcher, overlap, alike, zeros),) = chance.choices(groups, numbers)
        pipeline, zero = chance.choice(alike), chance.choice(zeros)
        base = MicroBatchChoice(fold, size, dispatcher, overlap)
        m = base.mapping(pipeline, zero, chance.choice(space.optimizer_placements))
        recompute, offload = chance.choice(space.strategies)
        yield replace(m, recompute=recompute, offload=(*offload, *m.offload))


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_published_mapping_is_among_the_best_tenth(name):
    case = CASES[name]
    found = predict(case)
    search = search_of(case, found.workload, found.mapping)
    seconds = search.cost_model.step_time(found.mapping).total_s
    ((best,),) = search.find([SearchTarget()])
    fitting = [m for m in some_mappings(search.space, SAMPLE) if search.memory_model.estimate(m).fits]
    ahead = sum(search.cost_model.step_time(m).total_s < seconds for m in fitting) / len(fitting)
    place = f"{1 + len(search.plans_below(seconds))} of {len(search.space.folds)}"
    print(f"\n| {name} | {seconds:.3f} | {best.time.total_s:.3f} | {place} | {ahead:.1%} of {len(fitting)} |")
    # moefold refuses overlap with DeepEP, which five sources have.
    overlaps = found.mapping.overlap and found.mapping.dispatcher.kind != "deepep"
    can_run_s = search.cost_model.step_time(replace(found.mapping, overlap=overlaps)).total_s
    assert best.time.total_s <= can_run_s * (1 + 1e-9)
    assert len(fitting) > LEAST_SAMPLE
    assert ahead < 0.1


def test_the_cases_equal_the_table():
    assert len(CASES) > 30
    assert sum(case.gpu == "h100" for case in CASES.values()) > 5
    for case in CASES.values():
        assert case.mapping.world_size > 1


def test_a_case_searches_mappings_that_run():
    case = next(iter(CASES.values()))
    found = predict(case)
    search = search_of(case, found.workload, found.mapping)
    check_config(search.space.constraints.config_with({"tp": 1, "cp": 1, "pp": 1, "ep": 1, "etp": 1}))
