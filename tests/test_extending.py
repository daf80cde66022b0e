"""The examples of docs/extending.md: each registers a part, trains two steps and equals a reference."""

import importlib
import json
import re
import sys
import tomllib
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import replace
from functools import partial
from importlib.metadata import EntryPoint
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from moefold.api import build_model, load_config, train_model
from moefold.cli.main import main
from moefold.config import find, outside
from moefold.config.parallel import ParallelConfig
from moefold.config.part import Part
from moefold.config.pipeline_action import find_deadlock
from moefold.config.schema import Config
from moefold.cost.flops import count_parameters
from moefold.cost.stage_memory import max_in_flight
from moefold.data import ProgramData
from moefold.errors import ConfigError, NoFormulaError
from moefold.metrics.step_metrics import METRICS_FILE, read_records
from moefold.parallel.parallelize import parallelize
from moefold.parts.schedule.csv import CsvSchedule
from moefold.planner.cost_model.bubble import bubble_s
from moefold.planner.search.constraints import MappingConstraints, Restriction
from moefold.planner.search.space import MappingSpace
from moefold.planner.simulator.simulate import Segment, StageSegments, simulate, slot_rows
from moefold.topology.schedules import runtime_slots
from moefold.train.batch import BatchSharder
from moefold.train.train_step import TrainingStep
from moefold.validate.config import check_config
from moefold.verify.compare import compare_records, run_oracle
from moefold.verify.distributed_run import DistributedRecord, create_groups, gather_full_tensors, run_distributed
from moefold.verify.oracle_objectives import objective_of
from moefold.verify.ranks.pool import WorkerPool
from tests.verify.oracle import TOLERANCE
from tests.verify.recipes import tiny, without_mapping

PAGE = Path(__file__).parents[1] / "docs" / "extending.md"
LR = 1e-2


def blocks(language: str, heading: str) -> list[str]:
    """Return the code of a section of the page."""
    section = PAGE.read_text().split(f"\n## {heading}\n")[1].split("\n## ")[0]
    return re.findall(rf"```{language}\n(.*?)```", section, re.DOTALL)


def _register(heading: str) -> None:
    """Run the code of a section in a module of its own, on a rank of the pool, which ends after its task."""
    module = ModuleType("extension")
    sys.modules["extension"] = module
    for block in blocks("python", heading):
        exec(compile(block, str(PAGE), "exec"), module.__dict__)


def _install_dispatcher() -> None:
    """Run the code of the section, and find its part as if a package had the entry point of the page."""
    _register("A dispatcher")
    [toml] = blocks("toml", "A dispatcher")
    [(group, found)] = tomllib.loads(toml)["project"]["entry-points"].items()
    [(kind, value)] = found.items()
    point = EntryPoint(kind, value.replace("gathering:", "extension:"), group)
    outside._all_entry_points = lambda: (point,)
    for function in (outside.entry_points_of, find.kinds, find.find_part):
        function.cache_clear()


def _run_with_dispatcher(cfg: Config, other: Config) -> tuple[DistributedRecord, DistributedRecord]:
    _install_dispatcher()
    check_config(cfg)
    return run_distributed(cfg, 2), run_distributed(other, 2)


def _plans_with_dispatcher(*kinds: str) -> list[tuple[dict[str, Any], str]]:
    """Return the plan of a fixed mapping, and the dispatcher of the recipe that it writes, for some dispatchers."""
    _install_dispatcher()
    found = []
    for kind in kinds:
        fixed = f"tp=1,cp=1,pp=1,ep=4,etp=1,mbs=1,zero=3,recompute=layer,offload=none,overlap=off,dispatcher={kind}"
        output = StringIO()
        with TemporaryDirectory() as folder, redirect_stdout(output):
            path = Path(folder) / "planned.toml"
            words = ["plan", "qwen3-30b-a3b", "--gpu", "h200", "--num-gpus", "8", "--fix", fixed]
            assert main([*words, "--json", "--recipe", str(path)]) == 0
            written = tomllib.loads(path.read_text())["parallel"].get("dispatcher", "")
        found.append((json.loads(output.getvalue())["mappings"][0], written))
    return found


def _problems_with_dispatcher(cfg: Config) -> str:
    _install_dispatcher()
    try:
        check_config(cfg)
    except ConfigError as error:
        return str(error)
    return ""


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Install the schedule of the page, with its entry point, into a folder."""
    folder = tmp_path_factory.mktemp("installed")
    [code], [entry] = blocks("python", "A pipeline schedule"), blocks("toml", "A pipeline schedule")
    (folder / "eager.py").write_text(code)
    metadata = folder / "moefold_eager-0.1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: moefold-eager\nVersion: 0.1\n")
    header = '[project.entry-points."moefold.schedule"]'
    (metadata / "entry_points.txt").write_text(entry.replace(header, "[moefold.schedule]").replace('"', ""))
    return str(folder)


def in_package(folder: str, task: Callable[..., Any], *arguments: Any) -> Any:
    """Run a task where the package is installed: on a rank of the pool, which ends after it."""
    sys.path.insert(0, folder)
    importlib.invalidate_caches()
    for name in [name for name in sys.modules if name.startswith("moefold.config.")]:
        for cached in vars(sys.modules[name]).values():
            if hasattr(cached, "cache_clear"):
                cached.cache_clear()
    return task(*arguments)


def _run_with_schedule(cfg: Config) -> DistributedRecord:
    check_config(cfg)
    assert find_deadlock(runtime_slots(cfg)) is None
    return run_distributed(cfg, 2)


def _price_with_schedule(cfg: Config) -> tuple[list[int], list[float]]:
    """Return the micro-batches in flight on each rank, and the idle seconds: priced, many at once, and simulated."""
    p = cfg.parallel
    count = cfg.num_micro_batches
    bubble = partial(bubble_s, pp=p.pp, num_micro_batches=count, schedule=p.schedule)
    array = np.array([[1.0]])
    work = StageSegments(
        forward=(Segment("work", 1.0),), backward=(Segment("work", 2.0),), input_gradient=(), weight_gradient=()
    )
    timeline = simulate(slot_rows(p.schedule, p.pp, 1, count), [work] * p.pp)
    priced = bubble(1.0, 2.0, 1.0, vpp=1), float(bubble(array, 2 * array, array, vpp=np.array([[1]]))[0, 0])
    return max_in_flight(cfg, p.pp), [*priced, timeline.span_s - 3.0 * count]


def _run_with_block(cfg: Config, steps: int) -> tuple[DistributedRecord, int]:
    _register("A block")
    cfg = _with_gated_attention(cfg)
    return run_distributed(cfg, steps), count_parameters(cfg.model).total


def _with_gated_attention(cfg: Config) -> Config:
    """Return a recipe with the example, on a rank that has its module."""
    model = cfg.model
    part = sys.modules["extension"].GatedPart(num_heads=model.num_attention_heads, head_dim=model.head_size)
    return _with(cfg, "model", attention=part)


def _with(cfg: Config, section: str, **keys: Any) -> Config:
    return replace(cfg, **{section: replace(getattr(cfg, section), **keys)})


def _assert_close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], rtol: float = 1e-9) -> None:
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        torch.testing.assert_close(
            found[name], tensor, rtol=rtol, atol=1e-12, msg=lambda text, name=name: f"{name}: {text}"
        )


def test_the_page_has_the_package_of_the_tests():
    folder = Path(__file__).parent / "plugin"
    written = [
        *blocks("python", "A learning-rate schedule"),
        *blocks("python", "A loss of reinforcement learning"),
        blocks("toml", "A learning-rate schedule")[0],
    ]
    files = {block.partition("\n")[0].removeprefix("# "): block.partition("\n")[2] for block in written}
    package = folder / "src"
    parts = {path.relative_to(package).as_posix(): path.read_text() for path in package.rglob("[a-z]*.py")}
    assert files == parts | {"pyproject.toml": (folder / "pyproject.toml").read_text()}


@pytest.mark.parity
def test_example_of_a_dispatcher_equals_the_builtin(pool: WorkerPool) -> None:
    """Train two steps with the example and with `allgather`."""
    builtin = tiny(world_size=2, ep=2, dispatcher="allgather")
    for mine, theirs in pool.run(2, _run_with_dispatcher, _with(builtin, "parallel", dispatcher="gathering"), builtin):
        _assert_close(mine.gradients, theirs.gradients)
        _assert_close(mine.weights, theirs.weights)


def test_example_of_a_dispatcher_is_priced_by_what_it_sends(pool: WorkerPool) -> None:
    """Compare the plan of the example with the built-in dispatcher that sends the same, and with one that does not."""
    [plans] = pool.run(1, _plans_with_dispatcher, "gathering", "allgather", "alltoall")
    (mine, written), (like, _), (other, _) = plans
    assert (mine["dispatcher"], written) == ("gathering", "gathering")
    assert mine["step_time_s"] == like["step_time_s"] != other["step_time_s"]
    assert mine["memory_gib"] == pytest.approx(like["memory_gib"], rel=0.01)


def test_example_of_a_dispatcher_is_refused_where_it_says_so(pool: WorkerPool) -> None:
    """Check rules that the part states, and rules that its facts imply."""
    cfg = _with(tiny(world_size=2, ep=2), "parallel", dispatcher="gathering")
    cases = (
        (_with(cfg, "moe", capacity_factor=1.0), "parallel.dispatcher='gathering' cannot run: it drops no token"),
        (_with(cfg, "parallel", ep=1, etp=2), "parallel.dispatcher='gathering' sends tokens to whole experts"),
    )
    for broken, message in cases:
        [found] = pool.run(1, _problems_with_dispatcher, broken)
        assert message in found


@pytest.mark.parity
def test_example_of_a_block_equals_one_rank(pool: WorkerPool) -> None:
    """Train two steps on two ranks with tp=2 and on one, with AdamW and with Muon."""
    for optimizer in ("adamw", "muon"):
        one = tiny(train={"optimizer": optimizer})
        [(alone, num_parameters)] = pool.run(1, _run_with_block, one, 2)
        assert sum(weight.numel() for weight in alone.weights.values()) == num_parameters
        assert alone.gradients["layers.0.attention.wg"].abs().max() > 0
        two = replace(one, parallel=ParallelConfig(world_size=2, tp=2, ep=2))
        record, _ = pool.run(2, _run_with_block, two, 2)[0]
        _assert_close(record.gradients, alone.gradients, rtol=1e-12)
        _assert_close(record.weights, alone.weights, rtol=1e-12)


def _run_with_loss(cfg: Config) -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
    """Train two steps; return the loss terms, and the weights of this rank's stage if it is the first of the stage."""
    _register("A loss and its data")
    extension = sys.modules["extension"]
    groups = create_groups(cfg)
    model = parallelize(cfg, groups, extension.PolicyGradientLoss())
    batches = BatchSharder(extension.Rollouts(), cfg, groups, model.positions)
    training = TrainingStep(model, cfg)
    steps = [training.run(batches.batch(4 * i), i + 1) for i in range(2)]
    return [step.loss_terms for step in steps], gather_full_tensors(model)


def _expected_terms(cfg: Config) -> dict[str, float]:
    """Compute the loss terms of the first batch with torch alone."""
    _register("A loss and its data")
    batch = sys.modules["extension"].Rollouts().batch(0, 4)
    logits = build_model(cfg)(torch.from_numpy(batch.inputs)).transpose(0, 1)
    log_probs = logits.log_softmax(-1).gather(-1, torch.from_numpy(batch.labels).unsqueeze(-1)).squeeze(-1)
    policy = -log_probs * torch.from_numpy(batch.token_columns["advantages"])
    weights = torch.from_numpy(batch.weights / batch.weights.sum())
    z = 1e-2 * logits.logsumexp(-1).square()
    return {"policy": float((policy * weights).sum()), "z": float((z * weights).sum())}


@pytest.mark.parity
@pytest.mark.parametrize("mapping", [{"tp": 2}, {"pp": 2}, {"cp": 2}], ids=str)
def test_example_of_a_loss_equals_torch_and_one_rank(pool: WorkerPool, mapping: dict[str, int]) -> None:
    """Compare the loss terms of two steps, and the weights after them."""
    one = tiny()
    [(expected, weights)] = pool.run(1, _run_with_loss, one)
    assert expected[0] == pytest.approx(pool.run(1, _expected_terms, one)[0], rel=1e-12)
    ranks = pool.run(2, _run_with_loss, replace(one, parallel=ParallelConfig(world_size=2, **mapping)))
    found: dict[str, torch.Tensor] = {}
    for terms, stage_weights in ranks:
        for step, reference in zip(terms, expected, strict=True):
            assert step == pytest.approx(reference, rel=1e-12)
        found |= stage_weights
    _assert_close(found, weights)


def _refusal_of(heading: str, cfg: Config) -> str:
    """Return why the oracle cannot judge a recipe with the example of a section, or "" if it can."""
    _install_dispatcher() if heading == "A dispatcher" else _register(heading)
    extension = sys.modules["extension"]
    cfg = _with_gated_attention(cfg) if hasattr(extension, "GatedPart") else cfg
    try:
        if loss := getattr(extension, "PolicyGradientLoss", None):
            objective_of(loss())
        run_oracle(cfg, 1)
    except NoFormulaError as refusal:
        return str(refusal)
    return ""


@pytest.mark.parity
@pytest.mark.parametrize(
    ("heading", "section", "keys", "refused"),
    [
        ("A dispatcher", "parallel", {"dispatcher": "gathering"}, ""),
        ("A block", "model", {}, ""),
        ("A loss and its data", "model", {}, "the loss PolicyGradientLoss"),
    ],
)
def test_examples_are_judged_or_refused(
    pool: WorkerPool, heading: str, section: str, keys: dict[str, Any], refused: str
) -> None:
    """`moefold verify` compares mappings of any dispatcher and schedule, and refuses maths that its oracle lacks."""
    cfg = _with(tiny(train={"global_batch_size": 1}), section, **keys)
    [message] = pool.run(1, _refusal_of, heading, cfg)
    assert (f"no formula for {refused}," in message) if refused else message == ""


def test_program_trains_with_a_loss_and_data(tmp_path: Path) -> None:
    """Run the program of the page on one rank; the metrics have the terms by name."""
    _register("A loss and its data")
    cfg = sys.modules["extension"].train(str(tmp_path / "run"))
    records = [record for _, record in read_records(tmp_path / "run" / METRICS_FILE) if record is not None]
    assert len(records) == cfg.run.steps
    for record in records:
        assert set(record["loss_terms"]) == {"policy", "z"}
        assert record["loss"] == pytest.approx(sum(record["loss_terms"].values()))
    with pytest.raises(ConfigError, match="data=..."):
        train_model(replace(cfg, run=replace(cfg.run, dir=str(tmp_path / "other"))))


@pytest.mark.parity
def test_example_of_a_schedule_equals_one_rank(pool: WorkerPool, package: str) -> None:
    """Train two steps on two pipeline ranks and on one."""
    one = tiny(train={"global_batch_size": 8, "lr": LR})
    [alone] = pool.run(1, run_distributed, one, 2)
    two = _with(one, "parallel", world_size=2, pp=2, schedule="eager")
    first, last = pool.run(2, in_package, package, _run_with_schedule, two)
    assert [step.loss for step in first.steps] == pytest.approx([step.loss for step in alone.steps], rel=1e-12)
    torch.testing.assert_close(first.gradients | last.gradients, alone.gradients, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(first.weights | last.weights, alone.weights, rtol=1e-12, atol=1e-12)


def _judge_with_schedule(cfg: Config, records: list[DistributedRecord]) -> float:
    """Return the largest difference from the oracle, which does not read the schedule."""
    return compare_records(run_oracle(without_mapping(cfg), 2), records)[0].error


@pytest.mark.parity
def test_example_of_a_schedule_is_judged_and_searched(pool: WorkerPool, package: str) -> None:
    """The oracle judges a run with it, and the planner tries it beside the built-in ones."""
    cfg = _with(tiny(train={"global_batch_size": 8}), "parallel", world_size=2, pp=2, schedule="eager")
    records = pool.run(2, in_package, package, _run_with_schedule, cfg)
    [error] = pool.run(1, in_package, package, _judge_with_schedule, cfg, records)
    assert error < TOLERANCE
    [kinds] = pool.run(1, in_package, package, _searched_schedules)
    assert "eager" in kinds
    assert "csv" not in kinds


def _searched_schedules() -> set[str]:
    cfg = load_config(None, ["model.preset=tiny", "parallel.world_size=2", "parallel.pp=2", "parallel.schedule=eager"])
    space = MappingSpace(MappingConstraints(cfg), Restriction({"pp": 2}))
    found = {run["schedule"] for fold, view in space.folds for run in space.sample_mappings(fold, view)}
    return {schedule.kind if isinstance(schedule, Part) else schedule for schedule in found}


@pytest.mark.parity
def test_example_of_a_schedule_is_priced(pool: WorkerPool, package: str) -> None:
    """Compare memory in flight and idle time with 1F1B, to which warm-up adds a micro-batch and no time."""
    base = tiny(world_size=4, pp=4, model={"num_layers": 4}, train={"global_batch_size": 16})
    [(in_flight, idle)] = pool.run(
        1, in_package, package, _price_with_schedule, _with(base, "parallel", schedule="eager")
    )
    assert in_flight == [count + 1 for count in max_in_flight(base, 4)] == [5, 4, 3, 2]
    assert idle == [bubble_s(1.0, 2.0, 1.0, pp=4, vpp=1, num_micro_batches=16, schedule="1f1b")] * 3


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.kind=synthetic", 'must be "program"'),
        ("train.seq_len=8", "must be the seq_len of the samples, 16"),
        ("train.eval_every=1", "needs validation samples"),
    ],
)
def test_program_data_must_fit_the_recipe(tmp_path: Path, override: str, message: str) -> None:
    """Reject data that the recipe does not ask for, or that does not fit it."""
    _register("A loss and its data")
    overrides = ["model.preset=tiny", "train.seq_len=16", "data.kind=program", "train.eval_every=0", "run.device=cpu"]
    cfg = load_config(None, [*overrides, f"run.dir={tmp_path / 'run'}", override])
    with pytest.raises(ConfigError, match=message):
        train_model(cfg, data=ProgramData(sys.modules["extension"].Rollouts()))


def test_example_of_a_schedule_is_read(tmp_path: Path) -> None:
    """Read the example as the rows of two ranks with two micro-batches."""
    [table] = blocks("csv", "A pipeline schedule")
    path = tmp_path / "schedule.csv"
    path.write_text(table)
    found = CsvSchedule(path=str(path)).rows(2, 1, 2)
    assert [[str(action) for (action,) in row] for row in found] == [line.split(",") for line in table.split()]
