"""A batch that is not finite, under every axis: the weights equal the weights of a run that never had it."""

import json
import math
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from moefold.checkpoint.checkpoint_meta import read_meta
from moefold.checkpoint.stored_tensors import differing_tensors
from moefold.comm.groups import ParallelGroups
from moefold.config.schema import Config
from moefold.config.sections.checkpoint import CheckpointConfig
from moefold.config.sections.sites import SitesConfig
from moefold.errors import RunError
from moefold.model.transformer import Embedding
from moefold.train.signals import StopSignals
from moefold.train.trainer import Trainer
from moefold.validate.config import check_config
from tests.metrics.faults import read_faults
from tests.slow import slow
from tests.train.poisoned_runs import (
    BATCH,
    POISON,
    POISONED_ROW,
    SEQ_LEN,
    farthest,
    last_checkpoint,
    poison,
    recipe,
    write_tokens,
)
from tests.verify.shared_ranks import run_each

pytestmark = pytest.mark.parity


def train(cfg: Config, hook: Callable[..., Any] = poison) -> str:
    """Run to the end; returns the message of a fault."""
    handle = torch.nn.modules.module.register_module_forward_hook(hook)
    try:
        Trainer(cfg, ParallelGroups.create(check_config(cfg), torch.device("cpu"))).run(StopSignals())
    except RunError as error:
        return str(error)
    finally:
        handle.remove()
    return ""


def records(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def without(pool, tmp_path_factory) -> Path:
    """A run of six steps on one rank whose data lacks the fourth batch."""
    folder = tmp_path_factory.mktemp("without")
    data = write_tokens(folder / "lacks.npy", lacks=tuple(range(3 * BATCH, 4 * BATCH)))
    assert pool.run(1, train, recipe(folder / "run", data, 6, {})) == [""]
    return folder / "run"


CASES = [
    pytest.param("skip", {}, id="skip", marks=pytest.mark.slow),
    # Fast: a batch skipped under dp equals the same run in `test_a_spike_of_the_gradient_is_answered_as_...`.
    pytest.param("skip", {"world_size": 2, "zero": 0}, id="skip-dp", marks=pytest.mark.slow),
    pytest.param("skip", {"world_size": 2, "tp": 2, "etp": 2}, id="skip-tp", marks=pytest.mark.slow),
    pytest.param("skip", {"world_size": 4, "pp": 2, "ep": 2, "zero": 2}, id="skip-dp-pp-ep", marks=pytest.mark.slow),
    pytest.param("rollback", {"world_size": 2, "ep": 2, "zero": 3}, id="rollback-dp-ep", marks=pytest.mark.slow),
    pytest.param("rollback", {"world_size": 2, "pp": 2}, id="rollback-pp"),
    pytest.param(
        "rollback", {"world_size": 4, "tp": 2, "cp": 2, "ep": 4}, id="rollback-tp-cp-ep", marks=pytest.mark.slow
    ),
]


@pytest.mark.parametrize(("action", "parallel"), CASES)
def test_weights_equal_a_run_that_lacks_the_batch(pool, tmp_path, without, action, parallel):
    data = write_tokens(tmp_path / "data.npy")
    steps = 7 if action == "skip" else 6
    cfg = recipe(tmp_path / "run", data, steps, {"nonfinite": action}, **parallel)
    assert pool.run(cfg.parallel.world_size, train, cfg) == [""] * cfg.parallel.world_size
    assert farthest(tmp_path / "run", without) < 1e-9
    lines = records(tmp_path / "run")
    assert [line["step"] for line in lines] == list(range(1, steps + 1))
    assert [line["skipped"] for line in lines] == [None] * 3 + (["nonfinite"] if action == "skip" else []) + [None] * 3
    (fault,) = read_faults(tmp_path / "run")
    assert (fault["step"], fault["kind"], fault["action"]) == (4, "nonfinite", action)
    assert POISONED_ROW in fault["samples"]
    losses = [line["loss"] for line in lines if line["skipped"] is None]
    assert losses == pytest.approx([line["loss"] for line in records(without)], rel=1e-9)


def test_a_resume_after_a_skip_goes_on_bit_equal(pool, tmp_path):
    data = write_tokens(tmp_path / "data.npy")
    runs = [
        (recipe(tmp_path / name, data, steps, {"nonfinite": "skip"}),)
        for name, steps in (("whole", 6), ("cut", 4), ("cut", 6))
    ]
    assert run_each(pool, 1, train, *runs) == [[""]] * 3
    assert differing_tensors(last_checkpoint(tmp_path / "cut"), last_checkpoint(tmp_path / "whole")) == []


def test_stop_names_rank_parameter_and_samples_and_saves_nothing(pool, tmp_path):
    data = write_tokens(tmp_path / "data.npy")
    cfg = recipe(tmp_path / "run", data, 6, {}, world_size=2)
    messages = pool.run(2, train, cfg)
    assert messages[0] == messages[1]
    message = messages[0]
    assert "step 4: the loss is nan and" in message
    assert "the loss on rank 1 (" in message
    assert "the reduced gradient of head.weight on rank 0 (" in message, "the first that the backward pass meets"
    assert "; not finite in a rerun of the step either; " in message
    assert "samples 12 to 15 of the run, of which these ranks read 2: row 14 (" in message
    assert f"{data}, token {POISONED_ROW * SEQ_LEN}" in message
    assert f"{str(tmp_path / 'run' / 'checkpoints' / 'step-000002')!r}, is intact" in message
    assert last_checkpoint(tmp_path / "run").name == "step-000002"
    assert len(records(tmp_path / "run")) == 3


@pytest.mark.parametrize("sound", [2, *slow([(0,)])])
def test_a_checkpoint_that_is_damaged_is_not_called_intact(pool, tmp_path, sound):
    data = write_tokens(tmp_path / "data.npy", poisoned=(5 * BATCH,))
    cfg = replace(recipe(tmp_path / "run", data, 8, {}, world_size=2), checkpoint=CheckpointConfig(every=2))
    messages = pool.run(2, train, cfg, _Damage(tmp_path / "run" / "checkpoints", sound))
    assert messages[0] == messages[1]
    assert "step 6: the loss is nan" in messages[0]
    if sound:
        assert "the last sound checkpoint, " in messages[0]
        assert "step-000002', is intact as far as file sizes show (step-000004 is damaged: " in messages[0]
    else:
        assert "no checkpoint is intact (step-000004 is damaged: " in messages[0]


class _Damage:
    """As `poison`, and the checkpoints behind step `sound` lose a file before that."""

    def __init__(self, folder: Path, sound: int) -> None:
        self._folder, self._sound = folder, sound

    def __call__(self, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> Any:
        poisoned = poison(module, inputs, output)
        if poisoned is not output and torch.distributed.get_rank() == 0:
            for path in self._folder.glob("step-*"):
                if int(path.name[5:]) > self._sound:
                    (path / ".metadata").unlink(missing_ok=True)
        return poisoned


class _PoisonedGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * math.nan


def poison_gradient(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> Any:
    """Change only rank 1's gradient, at the embedding, in every step."""
    if isinstance(module, Embedding) and torch.distributed.get_rank() == 1 and output.requires_grad:
        return _PoisonedGradient.apply(output)
    return output


class _Once:
    """Lets a hook do its harm to only one forward pass."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> Any:
        poisoned = poison_gradient(module, inputs, output)
        self.calls += poisoned is not output
        return poisoned if self.calls == 2 else output


def test_a_gradient_that_is_not_finite_is_located(pool, tmp_path):
    data = write_tokens(tmp_path / "data.npy", poisoned=())
    cfg = recipe(tmp_path / "run", data, 6, {"nonfinite": "skip", "max_skips": 2}, world_size=2, tp=2)
    cfg = replace(cfg, checkpoint=CheckpointConfig(every=0, at_end=False))
    message, _ = pool.run(2, train, cfg, poison_gradient)
    assert "step 3: the gradient norm is nan, after 2 skipped steps in a row (faults.max_skips)" in message
    assert "the reduced gradient of embedding.weight on rank" in message
    assert "the loss on" not in message
    assert "there is no checkpoint yet" in message
    assert [line["skipped"] for line in records(tmp_path / "run")] == ["nonfinite"] * 2


@pytest.mark.parametrize("zero", [1, *slow([(0,), (3,)])])
def test_the_replica_whose_gradient_is_not_finite_is_named(pool, tmp_path, zero):
    data = write_tokens(tmp_path / "data.npy", poisoned=())
    cfg = recipe(tmp_path / "run", data, 6, {}, world_size=2, zero=zero)
    message, _ = pool.run(2, train, cfg, poison_gradient)
    assert "step 1: the gradient norm is nan; not finite: the gradients that rank 1 (" in message
    assert "; not finite in a rerun of the step either; " in message
    assert "samples 0 to 3 of the run, of which these ranks read 2: row 2 (" in message


def test_a_fault_that_does_not_come_again_is_called_one_of_a_machine(pool, tmp_path):
    data = write_tokens(tmp_path / "data.npy", poisoned=())
    cfg = recipe(tmp_path / "run", data, 4, {"nonfinite": "skip"}, world_size=2)
    pool.run(2, train, cfg, _Once())
    (fault,) = read_faults(tmp_path / "run")
    assert (fault["step"], fault["is_lasting"], fault["gradient_ranks"]) == (2, False, [])
    assert [line["skipped"] for line in records(tmp_path / "run")] == [None, "nonfinite", None, None]


def test_rollbacks_end_and_need_a_checkpoint(pool, tmp_path):
    bad = (1 * BATCH, 3 * BATCH, 4 * BATCH, 5 * BATCH)
    data = write_tokens(tmp_path / "data.npy", poisoned=bad[1:])
    cfg = recipe(tmp_path / "run", data, 8, {"nonfinite": "rollback", "max_rollbacks": 2})
    cfg = replace(cfg, checkpoint=replace(cfg.checkpoint, async_save=True))
    (message,) = pool.run(1, train, cfg)
    assert "step 4: the loss is nan" in message
    assert "after 2 rollbacks (faults.max_rollbacks)" in message
    assert [fault["batch"][0] for fault in read_faults(tmp_path / "run")] == list(bad[1:])
    data = write_tokens(tmp_path / "early.npy", poisoned=bad[:1])
    (message,) = pool.run(1, train, recipe(tmp_path / "early", data, 8, {"nonfinite": "rollback"}))
    assert "no checkpoint yet to go back to" in message


def amplify(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> Any:
    """The poisoned sample makes a gradient a thousand times as large, and leaves the loss as it is."""
    if isinstance(module, Embedding) and bool((inputs[0] == POISON).any()) and output.requires_grad:
        return 1000 * output - 999 * output.detach()
    return output


@pytest.mark.parametrize(("action", "same"), [("skip", True), *slow([("log", False)])])
def test_a_spike_of_the_gradient_is_answered_as_the_recipe_says(pool, tmp_path, without, action, same):
    data = write_tokens(tmp_path / "data.npy")
    faults = {"spike": action, "spike_window": 3, "spike_factor": 40.0}
    cfg = recipe(tmp_path / "run", data, 7, faults, world_size=2)
    assert pool.run(2, train, cfg, amplify) == ["", ""]
    (fault,) = read_faults(tmp_path / "run")
    assert (fault["step"], fault["kind"], fault["action"]) == (4, "spike", action)
    assert (farthest(tmp_path / "run", without) < 1e-9) == same


def flip_on_rank_2(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
    """After its third step, one bit of the first weight that it updates."""
    parameter = optimizer.param_groups[0]["params"][0]
    if torch.distributed.get_rank() == 2 and int(optimizer.state[parameter]["step"]) == 3:
        parameter.to_local().detach().flatten().view(torch.int64)[0] ^= 1


def _train_with_a_flip(cfg: Config, hook: Callable[..., Any] = poison) -> str:
    handle = register_optimizer_step_post_hook(flip_on_rank_2)
    try:
        return train(cfg, hook)
    finally:
        handle.remove()


def _train_with_a_flip_and_a_signal(cfg: Config) -> str:
    return _train_with_a_flip(cfg, _Sigterm())


class _Sigterm:
    """Sends rank 1 the signal in its third step, if each has one micro-batch."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> Any:
        self.calls += isinstance(module, Embedding)
        if self.calls == 3 and isinstance(module, Embedding) and torch.distributed.get_rank() == 1:
            signal.raise_signal(signal.SIGTERM)
        return output


@pytest.mark.parametrize(
    ("checkpoint", "steps", "run", "seen_at"),
    [
        pytest.param(CheckpointConfig(every=2), 8, _train_with_a_flip, 4, id="every", marks=pytest.mark.slow),
        pytest.param(
            CheckpointConfig(every=2, async_save=True), 8, _train_with_a_flip, 4, id="async", marks=pytest.mark.slow
        ),
        pytest.param(CheckpointConfig(every=100), 4, _train_with_a_flip, 4, id="last", marks=pytest.mark.slow),
        pytest.param(CheckpointConfig(every=2), 8, _train_with_a_flip_and_a_signal, 3, id="signal"),
    ],
)
def test_replicas_that_have_diverged_are_never_saved(pool, tmp_path, checkpoint, steps, run, seen_at):
    data = write_tokens(tmp_path / "data.npy", poisoned=())
    cfg = recipe(tmp_path / "run", data, steps, {"replica_check_every": 7}, world_size=4, zero=0, ep=2)
    cfg = replace(cfg, checkpoint=checkpoint)
    messages = pool.run(4, run, cfg)
    assert len(set(messages)) == 1
    assert f"step {seen_at}: replicas have diverged: embedding.weight on rank 2 differs" in messages[0]
    last = "all were alike at the check of step 2: " if checkpoint.every == 2 else "no check came before: "
    assert last in messages[0]
    saved = [path.name for path in (tmp_path / "run").glob("checkpoints/step-*")]
    assert saved == (["step-000002"] if checkpoint.every == 2 else [])


@pytest.mark.parametrize(("before", "last"), [(1, "at the check of step 2: "), *slow([(0, "no check came before")])])
def test_the_last_check_is_known_after_a_resume_and_none_is_made_up(pool, tmp_path, before, last):
    data = write_tokens(tmp_path / "data.npy", poisoned=())
    cfg = recipe(tmp_path / "run", data, 2, {"replica_check_every": before}, world_size=2, zero=0, ep=2)
    assert pool.run(2, train, cfg) == [""] * 2
    cfg = recipe(tmp_path / "run", data, 8, {"replica_check_every": 3}, world_size=4, zero=0, ep=2)
    message = pool.run(4, _train_with_a_flip, cfg)[0]
    assert "step 3: replicas have diverged: " in message
    assert last in message


def test_a_check_before_each_save_lets_sound_replicas_go_on(pool, tmp_path):
    data = write_tokens(tmp_path / "data.npy", poisoned=())
    runs = []
    for name, every in (("checked", 3), ("unchecked", 0)):
        # Evaluating leaves FSDP's weights as a check finds them at no other time.
        cfg = recipe(tmp_path / name, data, 3, {"replica_check_every": every}, world_size=2, zero=2, ep=2)
        cfg = replace(cfg, data=replace(cfg.data, validation_fraction=0.2), train=replace(cfg.train, eval_every=2))
        runs.append((cfg,))
    assert run_each(pool, 2, train, *runs) == [[""] * 2] * 2
    assert differing_tensors(last_checkpoint(tmp_path / "checked"), last_checkpoint(tmp_path / "unchecked")) == []
    assert [line["replicas"] is not None for line in records(tmp_path / "checked")] == [False] * 2 + [True]


def test_a_replica_that_diverges_ends_the_run_before_it_is_saved(pool, tmp_path):
    data = write_tokens(tmp_path / "data.npy", poisoned=())
    cfg = recipe(tmp_path / "run", data, 6, {"replica_check_every": 2}, world_size=4, zero=0, ep=2)
    messages = pool.run(4, _train_with_a_flip, cfg)
    assert len(set(messages)) == 1
    assert "step 4: replicas have diverged: embedding.weight on rank 2 differs from the 3 other ranks" in messages[0]
    assert "look at rank 2 (" in messages[0]
    assert "all were alike at the check of step 2" in messages[0]
    assert last_checkpoint(tmp_path / "run").name == "step-000002"
    (fault,) = read_faults(tmp_path / "run")
    assert {tuple(one["ranks"]) for one in fault["found"]} == {(2,)}
    assert [line["replicas"] is not None for line in records(tmp_path / "run")] == [False, True, False, True]


@pytest.mark.slow
def test_rollback_forgets_the_round_under_way(pool, tmp_path):
    """The outer step of one site, overlapped: the differences of steps that are no more are not counted as a round."""
    data = write_tokens(tmp_path / "data.npy", poisoned=(5 * BATCH,))
    cfg = recipe(tmp_path / "run", data, 8, {"nonfinite": "rollback"})
    cfg = replace(cfg, sites=SitesConfig(method="diloco", lr=0.7, momentum=0.9, every=5, overlap=2))
    # The round of step 5 is under way when step 6 fails; the checkpoint of step 4 is damaged, so the checkpoint of
    # step 2 loads.
    assert pool.run(1, train, cfg, _Damage(tmp_path / "run" / "checkpoints", 2)) == [""]
    assert [fault["step"] for fault in read_faults(tmp_path / "run")] == [6]
    saved = {
        step: read_meta(tmp_path / "run" / "checkpoints" / f"step-{step:06d}").state_of("sites") for step in (4, 8)
    }
    assert saved[4]["rounds"] == 0
    assert "pending.due" not in saved[4]
    assert saved[8]["rounds"] == 2
