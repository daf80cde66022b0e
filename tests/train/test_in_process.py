"""Training inside the processes of a program: equal to `moefold train`, and the program goes on as before."""

import os
import signal
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import moefold
from moefold.config.schema import Config
from tests.train import policy_runs
from tests.train.tiny_runs import losses, recipe

pytestmark = pytest.mark.parity


def _state() -> dict[str, Any]:
    """State of torch in a program: its group, random numbers, and settings."""
    return {
        "group": dist.group.WORLD,
        "count": dist.distributed_c10d._world.group_count,
        "groups": dict(dist.distributed_c10d._world.pg_names),
        "random": torch.get_rng_state().tolist(),
        "threads": torch.get_num_threads(),
        "is_deterministic": torch.are_deterministic_algorithms_enabled(),
        "environment": dict(os.environ),
        "handlers": [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)],
    }


def _program(first: Config, second: Config) -> list[Any]:
    """A program with a process group of its own and a smaller one, which trains twice, under two mappings."""
    torch.manual_seed(dist.get_rank())
    odd = dist.new_group([0, dist.get_world_size() - 1])
    state = _state()
    steps: list[tuple[int, float]] = []
    outcomes = []
    for cfg in (first, second):
        outcomes.append(
            moefold.train_in_process(cfg, on_step=lambda metrics: steps.append((metrics["step"], metrics["loss"])))
        )
        assert _state() == state
    # Both groups of the program still work.
    total = torch.ones(1)
    for group in (dist.group.WORLD, odd):
        if dist.get_rank(group) >= 0:
            dist.all_reduce(total, group=group)
    return [outcomes, steps, total.item()]


def test_a_program_trains_twice_under_two_mappings_and_its_groups_still_work(pool, tmp_path: Path):
    one = recipe(tmp_path / "one", 2, every=0)
    assert moefold.train_in_process(one).metrics["step"] == 2
    # dropless, float64: every mapping computes the same losses.
    first = recipe(tmp_path / "run", 1, world_size=2, tp=2, ep=2, every=1)
    second = recipe(tmp_path / "run", 2, world_size=2, ep=2, zero=3, every=1)
    (outcomes, steps, total), (others, other_steps, other_total) = pool.run(2, _program, first, second)
    assert total == other_total == 4
    assert steps == other_steps
    assert [step for step, _ in steps] == [1, 2]
    assert [loss for _, loss in steps] == pytest.approx(losses(tmp_path / "one"), rel=1e-9)
    assert [outcome.status for outcome in (*outcomes, *others)] == [0] * 4
    for outcome, step in zip(outcomes, (1, 2), strict=True):
        assert outcome.metrics["step"] == step
        assert outcome.checkpoint == tmp_path / "run" / "checkpoints" / f"step-{step:06}"
    assert [outcome.checkpoint for outcome in others] == [outcome.checkpoint for outcome in outcomes]


class FailingOnRank1(moefold.Callback):
    """Raises on one rank, after the first step."""

    def after_step(self, run: Any, step: Any) -> None:
        if run.groups.rank == 1:
            raise ZeroDivisionError("of the callback")


def _failing_program(cfg: Config) -> list[str]:
    """The errors of a failed run, of a recipe of another size, and the loss of a run after them."""
    errors = []
    single = replace(cfg, parallel=replace(cfg.parallel, world_size=1))
    for attempt, callbacks in ((cfg, [FailingOnRank1()]), (single, [])):
        try:
            moefold.train_in_process(attempt, callbacks=callbacks)
        except (ArithmeticError, moefold.RunError, moefold.ConfigError) as error:
            errors.append(f"{type(error).__name__}: {error}")
        dist.barrier()
    # In another thread no signal handler can be installed.
    thread = threading.Thread(target=lambda: errors.append(str(moefold.train_in_process(cfg).status)))
    thread.start()
    thread.join()
    return errors


def test_errors_are_raised_on_every_rank_and_the_program_goes_on(pool, tmp_path: Path):
    first, second = pool.run(2, _failing_program, recipe(tmp_path, 2, every=0, world_size=2))
    assert "RunError: rank 0" in first[0]
    assert "lost its connection to another rank" in first[0]
    assert second[0] == "ZeroDivisionError: of the callback"
    for errors in (first, second):
        assert "parallel.world_size=1 must equal the number of processes of this program, 2" in errors[1]
        assert "moefold.train_model" in errors[1]
        assert errors[2] == "0"


class Interrupting(moefold.Callback):
    """Sends the first step a Ctrl-C."""

    def after_step(self, run: Any, step: Any) -> None:
        if step.number == 1:
            signal.raise_signal(signal.SIGINT)


def test_ctrl_c_saves_and_returns_to_the_program(tmp_path: Path):
    cfg = recipe(tmp_path, 3)
    handler = signal.getsignal(signal.SIGINT)
    outcome = moefold.train_in_process(cfg, callbacks=[Interrupting()])
    assert outcome.status == 130
    assert outcome.metrics["step"] == 2
    assert outcome.checkpoint.name == "step-000002"
    assert signal.getsignal(signal.SIGINT) is handler
    assert not dist.is_initialized()
    done = moefold.train_in_process(cfg)
    assert (done.status, done.metrics["step"]) == (0, 3)
    descriptors = len(os.listdir("/dev/fd"))
    assert moefold.train_in_process(cfg) == done
    # A program may train as often as it likes.
    moefold.train_in_process(recipe(tmp_path, 4))
    assert len(os.listdir("/dev/fd")) == descriptors


def test_ranks_that_only_sample_are_refused(tmp_path: Path):
    cfg = recipe(tmp_path, 1)
    with pytest.raises(moefold.ConfigError, match=r"rollout.ranks=1 only sample"):
        moefold.train_in_process(replace(cfg, rollout=replace(cfg.rollout, ranks=1)))


class _Stop(moefold.Callback):
    """Requests a stop in the second step."""

    def after_step(self, context: Any, step: Any) -> None:
        context.stop.request(signal.SIGTERM)


@pytest.mark.parametrize("reads_rewards", [False, True])
def test_a_run_of_all_steps_without_its_last_evaluation_is_not_finished(tmp_path, reads_rewards):
    if reads_rewards:
        cfg = policy_runs.recipe(tmp_path, 2)
        cfg = replace(cfg, train=replace(cfg.train, eval_every=2))
    else:
        cfg = recipe(tmp_path / "run", 2, train={"eval_every": 2})
    whole = replace(cfg, run=replace(cfg.run, dir=str(tmp_path / "whole")))
    assert moefold.train_in_process(whole).status == 0
    assert moefold.train_in_process(cfg, callbacks=[_Stop()]).status == 128 + signal.SIGTERM
    assert moefold.train_in_process(cfg).status == 0
    (found, wanted) = ([_held_out(record) for record in policy_runs.records(one)] for one in (cfg, whole))
    assert found == wanted
    assert wanted[-1] is not None
    # Now it is: the metrics of a finished run are read, and no rank starts.
    assert moefold.train_in_process(cfg).metrics == policy_runs.records(cfg)[-1]


def _held_out(record: dict[str, Any]) -> float | None:
    return record["rl"]["eval_reward"] if record["rl"] else record["eval_loss"]
