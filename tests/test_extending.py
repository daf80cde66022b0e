"""The examples of docs/extending.md: each registers a part, trains two steps and equals a reference."""

import re
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from moefold.api import build_model, load_config, train_model
from moefold.config.schema import Config, ParallelConfig
from moefold.cost.flops import count_parameters
from moefold.cost.stage_memory import max_in_flight
from moefold.data import ProgramData
from moefold.errors import ConfigError, NoFormulaError
from moefold.metrics.step_metrics import METRICS_FILE, read_records
from moefold.parallel.parallelize import parallelize
from moefold.planner.cost_model.bubble import bubble_s
from moefold.planner.simulator.simulate import Segment, StageSegments, simulate, slot_rows
from moefold.testing.pool import WorkerPool
from moefold.topology.pipeline_action import find_deadlock
from moefold.topology.schedule_csv import read_schedule
from moefold.topology.schedules import runtime_slots
from moefold.train.batch import BatchSharder
from moefold.train.train_step import TrainingStep
from moefold.validate.config import check_config
from moefold.verify.compare import run_oracle
from moefold.verify.distributed_run import DistributedRecord, create_groups, gather_full_tensors, run_distributed
from moefold.verify.oracle_objectives import objective_of
from tests.verify.recipes import tiny

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


def _run_with_dispatcher(cfg: Config, other: Config) -> tuple[DistributedRecord, DistributedRecord]:
    _register("A dispatcher")
    return run_distributed(cfg, 2), run_distributed(other, 2)


def _run_with_schedule(cfg: Config) -> DistributedRecord:
    _register("A pipeline schedule")
    check_config(cfg)
    assert find_deadlock(runtime_slots(cfg)) is None
    return run_distributed(cfg, 2)


def _price_with_schedule(cfg: Config) -> tuple[list[int], list[float]]:
    """Return the micro-batches in flight on each rank, and the idle seconds: priced, many at once, and simulated."""
    _register("A pipeline schedule")
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
    return run_distributed(cfg, steps), count_parameters(cfg.model).total


def _with(cfg: Config, section: str, **keys: Any) -> Config:
    return replace(cfg, **{section: replace(getattr(cfg, section), **keys)})


def _assert_close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], rtol: float = 1e-9) -> None:
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        torch.testing.assert_close(
            found[name], tensor, rtol=rtol, atol=1e-12, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parity
def test_example_of_a_dispatcher_equals_the_builtin(pool: WorkerPool) -> None:
    """Train two steps with the example and with `allgather`."""
    builtin = tiny(world_size=2, ep=2, dispatcher="allgather")
    for mine, theirs in pool.run(2, _run_with_dispatcher, _with(builtin, "parallel", dispatcher="gathering"), builtin):
        _assert_close(mine.gradients, theirs.gradients)
        _assert_close(mine.weights, theirs.weights)


@pytest.mark.parity
def test_example_of_a_block_equals_one_rank(pool: WorkerPool) -> None:
    """Train two steps on two ranks with tp=2 and on one, with AdamW and with Muon."""
    for optimizer in ("adamw", "muon"):
        builtin = tiny(model={"num_query_groups": 4}, train={"optimizer": optimizer})
        one = _with(builtin, "model", attention="gated")
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
    _register(heading)
    extension = sys.modules["extension"]
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
        ("A block", "model", {"attention": "gated", "num_query_groups": 4}, "model.attention='gated'"),
        ("A pipeline schedule", "parallel", {"schedule": "eager"}, ""),
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
def test_example_of_a_schedule_equals_one_rank(pool: WorkerPool) -> None:
    """Train two steps on two pipeline ranks and on one."""
    one = tiny(train={"global_batch_size": 8, "lr": LR})
    [alone] = pool.run(1, run_distributed, one, 2)
    two = _with(one, "parallel", world_size=2, pp=2, schedule="eager")
    first, last = pool.run(2, _run_with_schedule, two)
    assert [step.loss for step in first.steps] == pytest.approx([step.loss for step in alone.steps], rel=1e-12)
    torch.testing.assert_close(first.gradients | last.gradients, alone.gradients, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(first.weights | last.weights, alone.weights, rtol=1e-12, atol=1e-12)


@pytest.mark.parity
def test_example_of_a_schedule_is_priced(pool: WorkerPool) -> None:
    """Compare memory in flight and idle time with 1F1B, to which warm-up adds a micro-batch and no time."""
    base = tiny(world_size=4, pp=4, model={"num_layers": 4}, train={"global_batch_size": 16})
    [(in_flight, idle)] = pool.run(1, _price_with_schedule, _with(base, "parallel", schedule="eager"))
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
    found = read_schedule(str(path), 2, 1, 2)
    assert [[str(action) for action in row] for row in found.rows] == [line.split(",") for line in table.split()]
