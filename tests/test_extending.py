"""The examples of docs/extending.md: each registers a part, trains two steps and equals a reference."""

import re
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from moefold.config.schema import Config, ParallelConfig
from moefold.cost.flops import count_parameters
from moefold.cost.state_memory import rank_state_bytes
from moefold.testing.pool import WorkerPool
from moefold.topology.schedule_csv import read_schedule
from moefold.verify.distributed_run import DistributedRecord, run_distributed
from tests.verify.recipes import tiny

PAGE = Path(__file__).parents[1] / "docs" / "extending.md"
LR = 1e-2


def _blocks(language: str, heading: str) -> list[str]:
    section = PAGE.read_text().split(f"\n## {heading}\n")[1].split("\n## ")[0]
    return re.findall(rf"```{language}\n(.*?)```", section, re.DOTALL)


def _register(heading: str) -> None:
    """Run the code of a section in a module of its own, on a rank of the pool, which ends after its task."""
    module = ModuleType("extension")
    sys.modules["extension"] = module
    for block in _blocks("python", heading):
        exec(compile(block, str(PAGE), "exec"), module.__dict__)


def _run_with_dispatcher(cfg: Config, other: Config) -> tuple[DistributedRecord, DistributedRecord]:
    _register("A dispatcher")
    return run_distributed(cfg, 2), run_distributed(other, 2)


def _run_with_optimizer(cfg: Config, steps: int) -> tuple[DistributedRecord, int]:
    _register("An optimizer")
    return run_distributed(cfg, steps), rank_state_bytes(cfg, 0).optimizer


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


@pytest.mark.parity
def test_example_of_an_optimizer_equals_torch_and_one_rank(pool: WorkerPool) -> None:
    """Compare one step with torch.optim.SGD, and two steps on two ranks with two on one."""
    one = _with(tiny(train={"lr": LR, "clip_grad": 0.0}), "train", optimizer="sgd")
    [(first, _)] = pool.run(1, _run_with_optimizer, one, 1)
    weights = {name: torch.nn.Parameter(first.initial[name].clone()) for name in first.gradients}
    for name, weight in weights.items():
        weight.grad = first.gradients[name]
    rate = first.steps[0].lr
    torch.optim.SGD(weights.values(), lr=rate, momentum=one.train.beta1, weight_decay=one.train.weight_decay).step()
    _assert_close({name: first.weights[name] for name in weights}, {name: w.detach() for name, w in weights.items()})

    [(alone, state_bytes)] = pool.run(1, _run_with_optimizer, one, 2)
    # One moment in float64 for each number.
    assert state_bytes == 8 * sum(weight.numel() for weight in weights.values())
    two = replace(one, parallel=ParallelConfig(world_size=2, ep=2, zero=1))
    record, _ = pool.run(2, _run_with_optimizer, two, 2)[0]
    _assert_close(record.weights, alone.weights)


def test_example_of_a_schedule_is_read(tmp_path: Path) -> None:
    """Read the example as the rows of two ranks with two micro-batches."""
    [table] = _blocks("csv", "A pipeline schedule")
    path = tmp_path / "schedule.csv"
    path.write_text(table)
    found = read_schedule(str(path), 2, 1, 2)
    assert [[str(action) for action in row] for row in found.rows] == [line.split(",") for line in table.split()]
