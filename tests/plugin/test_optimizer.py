"""Test the optimizer of the package: trained, saved, counted, planned and verified."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from moefold.comm.groups import ParallelGroups
from moefold.config.base import part_registry
from moefold.config.schema import Config
from moefold.cost.hardware import load_device
from moefold.cost.rank_state_memory import RankStateMemory
from moefold.errors import ConfigError, NoFormulaError
from moefold.launch.rank_pool import WorkerPool
from moefold.model.local_param import local_tensor
from moefold.parallel.parallelize import parallelize
from moefold.planner.cost_model.step import CostModel
from moefold.planner.cost_model.workload import workload_from_config
from moefold.planner.mapping import ParallelMapping
from moefold.planner.model_spec import load_model_spec
from moefold.recipe import load_config
from moefold.train.train_step import TrainingStep
from moefold.validate.config import check_config
from moefold.verify.compare import compare_records, run_oracle
from moefold.verify.distributed_run import DistributedRecord, run_distributed
from tests.checkpoint.resumed_steps import train_steps
from tests.slow import slow
from tests.verify.oracle import TOLERANCE
from tests.verify.recipes import tiny, without_mapping
from tests.verify.shared_ranks import run_each

pytestmark = pytest.mark.parity


def _recipe(**mapping: int) -> Config:
    """Return a recipe with the optimizer."""
    cfg = tiny(train={"lr": 0.05, "clip_grad": 0.0}, **mapping)
    return replace(cfg, train=replace(cfg.train, optimizer=load_config(None, ["train.optimizer=sgd"]).train.optimizer))


def _largest_error(cfg: Config, records: list[DistributedRecord]) -> float:
    return compare_records(run_oracle(without_mapping(cfg), 2), records)[0].error


@pytest.mark.parametrize(
    "mapping",
    [{"zero": 2, "tp": 2}, *slow([({"zero": 0},), ({"zero": 1, "ep": 2},), ({"zero": 3},)])],
)
def test_it_equals_its_formula_under_each_mapping(pool: WorkerPool, mapping: dict[str, int]) -> None:
    cfg = _recipe(world_size=2, **mapping)
    records = pool.run(2, run_distributed, cfg, 2)
    assert pool.run(1, _largest_error, cfg, records)[0] < TOLERANCE
    other = replace(cfg, train=replace(cfg.train, optimizer="adamw"))
    assert pool.run(1, _largest_error, other, records)[0] > 0.01


def _refusal_without_formula(cfg: Config) -> str:
    part = part_registry.find_part("optimizer", "sgd")
    del part.formula
    try:
        run_oracle(cfg, 1)
    except NoFormulaError as refusal:
        return str(refusal)
    return ""


def test_without_a_formula_it_is_refused_by_name(pool: WorkerPool) -> None:
    [message] = pool.run(1, _refusal_without_formula, _recipe())
    assert "no formula for train.optimizer='sgd' (moefold-plugin-example 0.1)," in message


def _first_step(cfg: Config) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return the weights after a step, and the weights after a step of torch.optim.SGD."""
    record = run_distributed(cfg, 1)
    weights = {name: torch.nn.Parameter(record.initial[name].clone()) for name in record.gradients}
    for name, weight in weights.items():
        weight.grad = record.gradients[name]
    torch.optim.SGD(weights.values(), lr=record.steps[0].lr, momentum=0.9, weight_decay=0.1).step()
    return {name: record.weights[name] for name in weights}, {name: w.detach() for name, w in weights.items()}


def test_a_step_equals_torch(pool: WorkerPool) -> None:
    [(found, expected)] = pool.run(1, _first_step, _recipe())
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("zero", [3, *slow([(0,), (1,), (2,)])])
def test_a_checkpoint_comes_through_another_mapping(pool: WorkerPool, tmp_path: Path, zero: int) -> None:
    first = _recipe(world_size=2, ep=2, zero=zero)
    second = _recipe(world_size=2, tp=2, zero=3 - zero)
    first, second = (replace(cfg, run=replace(cfg.run, dir=str(tmp_path))) for cfg in (first, second))
    uncut = replace(first, run=replace(first.run, dir=str(tmp_path / "w")))
    saved = str(tmp_path / "checkpoints" / "step-000002")
    runs = (uncut, 0, 3, ""), (first, 0, 2, ""), (second, 2, 3, saved)
    (whole, _), (before, _), (after, _) = run_each(pool, 2, train_steps, *runs)
    assert before + after == pytest.approx(whole, rel=1e-9)


def _resume_as_adamw(cfg: Config, saved: str) -> str:
    try:
        train_steps(cfg, 1, 2, saved)
    except ConfigError as error:
        return str(error)
    return ""


def test_a_checkpoint_of_another_optimizer_is_refused(pool: WorkerPool, tmp_path: Path) -> None:
    cfg = _recipe()
    cfg = replace(cfg, run=replace(cfg.run, dir=str(tmp_path)))
    pool.run(1, train_steps, cfg, 0, 1, "")
    saved = str(tmp_path / "checkpoints" / "step-000001")
    other = replace(cfg, train=replace(cfg.train, optimizer="adamw"))
    [message] = pool.run(1, _resume_as_adamw, other, saved)
    assert "is of another optimizer, it has other moments instead of exp_avg" in message


def _bytes_of_states(cfg: Config) -> tuple[int, int, int]:
    """Return the bytes of the states by the formula, of the allocated states, and of moments that are offloaded."""
    groups = ParallelGroups.create(check_config(cfg), torch.device("cpu"))
    states = TrainingStep(parallelize(cfg, groups), cfg).optimizer.state.values()
    built = sum(local_tensor(x).numel() * x.element_size() for state in states for x in state.values())
    offload = replace(cfg.train, offload_optimizer="ssd", offload_dir="/tmp", offload_min_kib=0)
    moments = RankStateMemory(replace(cfg, train=offload)).offloaded_moments[0].offloaded
    return RankStateMemory(cfg).max_by_pp_rank[0].optimizer, built, moments


@pytest.mark.parametrize("mapping", [{"zero": 0}, {"zero": 3}, {"zero": 1, "tp": 2}])
def test_memory_is_counted_from_its_states(pool: WorkerPool, mapping: dict[str, int]) -> None:
    cfg = _recipe(world_size=2, **mapping)
    formula, built, moments = pool.run(2, _bytes_of_states, cfg)[0]
    assert formula == built == moments > 0


def _update_seconds() -> list[float]:
    """Return the planned seconds of an update with both optimizers."""
    seconds = []
    for optimizer in ("sgd", "adamw"):
        cfg = load_config(None, ["model.preset=mixtral-8x7b", f"train.optimizer={optimizer}"])
        costs = CostModel(
            load_model_spec("mixtral-8x7b"),
            load_device("h100"),
            workload_from_config(cfg.run, cfg.moe, cfg.train, "bf16"),
        )
        seconds.append(costs.data_parallel.cost(ParallelMapping(tp=2, dp=8, ep=8, edp=2, zero=1)).optimizer_s)
    return seconds


def test_a_plan_prices_its_traffic(pool: WorkerPool) -> None:
    [(sgd, adamw)] = pool.run(1, _update_seconds)
    assert sgd == pytest.approx(adamw * 26 / 34)


def _refused_words(words: list[str]) -> str:
    try:
        check_config(load_config(None, words))
    except ConfigError as error:
        return str(error)
    return ""


def test_keys_of_other_optimizers_are_refused(pool: WorkerPool) -> None:
    [message] = pool.run(1, _refused_words, ["train.optimizer=sgd", "train.optimizer.beta1=0.8"])
    assert message == (
        "train.optimizer.beta1 is not a key of 'sgd', whose keys are momentum, weight_decay; it is a key of 'adamw' or "
        "'muon'"
    )
