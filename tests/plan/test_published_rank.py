"""Where published mappings stand in the search: none is faster than the best found, and few are faster than they are.

The search prices the software of the source (Megatron-Core), not moefold. Run with -s for the table of
docs/cost-model.md.
"""

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from moefold.config.checks import check_config
from moefold.config.schema import Config, ParallelConfig, RunConfig, TrainConfig
from moefold.errors import ConfigError
from moefold.plan.accuracy import predict
from moefold.plan.device import load_device
from moefold.plan.legality import Legality
from moefold.plan.mapping import OPTIMIZER
from moefold.plan.memory import Memory
from moefold.plan.model_name import read_shape
from moefold.plan.published import Case, SkipRowError, case_of, read_rows
from moefold.plan.restriction import FOLDED, Restriction
from moefold.plan.search import Search
from moefold.plan.space import HOST, MappingSpace
from moefold.plan.step_time import Pricer

TABLE = Path(__file__).parent / "published" / "calibration.csv"


def cases() -> dict[str, Case]:
    """One case for each mapping of a model on some GPUs that moefold can run."""
    found: dict[str, Case] = {}
    for row in read_rows(TABLE):
        try:
            case = case_of(row)
        except SkipRowError:
            continue
        m = case.mapping
        degrees = f"tp{m.tp}-cp{m.cp}-pp{m.pp}-ep{m.ep}-etp{m.etp}"
        name = f"{case.model}-{m.world_size}x{case.gpu}-{case.workload.precision}-{degrees}"
        if row["value"].upper() != "OOM" and not case.workload.coupled and read_shape(case.model).config is not None:
            found.setdefault(name, case)
    return found


CASES = cases()


@cache
def best_published() -> set[str]:
    """The names of cases than which no other mapping of the same model, GPUs and batch was measured to be faster.

    A source that compares mappings also prints those that it advises against, at half the speed of its best.
    """
    fastest: dict[tuple[object, ...], tuple[float, str]] = {}
    for name, case in CASES.items():
        w = case.workload
        batch = w.seq_len, w.global_batch_size
        key = (case.model, case.gpu, case.mapping.world_size, w.precision, *batch, case.row["metric"])
        if key not in fastest or float(case.row["value"]) > fastest[key][0]:
            fastest[key] = float(case.row["value"]), name
    return {name for _, name in fastest.values()}


def search_of(case: Case) -> Search:
    shape, w = read_shape(case.model), case.workload
    assert shape.config is not None
    cfg = Config(
        run=RunConfig(device="cuda"),
        model=shape.config,
        parallel=ParallelConfig(world_size=case.mapping.world_size),
        train=TrainConfig(seq_len=w.seq_len, global_batch_size=w.global_batch_size),
    )
    # What a source offloads is taken to hide, so all may offload what it does, and nothing else.
    parts = tuple(part for part in case.mapping.offload if part != OPTIMIZER)
    fixed = {"offload": parts, "moments": HOST if OPTIMIZER in case.mapping.offload else "none"}
    space = MappingSpace(Legality(cfg), Restriction(fixed, FOLDED))
    memory = Memory(shape, w, load_device(case.gpu), cfg)
    return Search(space, Pricer(shape, load_device(case.gpu), w, memory.kept), memory)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_published_mapping_is_among_the_best_tenth(name):
    case = CASES[name]
    try:
        search = search_of(case)
    except ConfigError as refusal:
        pytest.skip(f"moefold refuses the model: {refusal}")
    mapping = predict(case).mapping
    seconds = search.pricer.step_time(mapping).total_s
    (best,) = search.first(1)
    faster, folds = search.num_faster(seconds), len(search.space.folds)
    print(f"\n| {name} | {seconds:.3f} | {best.time.total_s:.3f} | {1 + faster} of {folds} |")
    assert best.time.total_s <= seconds * (1 + 1e-9)
    assert name not in best_published() or faster < 0.1 * folds


def test_the_cases_are_those_of_the_table():
    assert len(CASES) > 30
    assert sum(case.gpu == "h100" for case in CASES.values()) > 5
    for case in CASES.values():
        assert case.mapping.world_size > 1


def test_a_case_searches_mappings_that_run():
    case = next(iter(CASES.values()))
    search = search_of(replace(case))
    check_config(search.space.legality.config_of({"tp": 1, "cp": 1, "pp": 1, "ep": 1, "etp": 1}))
