"""Test ranks that only sample, from the command line: kills at any point, lost ranks, and signals."""

import os
import signal

import pytest

from moefold.checkpoint.stored_tensors import differing_tensors
from tests.e2e.command import child_ids, interrupted, metrics, moefold, small, train
from tests.ops.c_kernels import needs_compiler

pytestmark = [pytest.mark.e2e, pytest.mark.slow, needs_compiler]

IN_TURN = (
    "data.kind=task",
    "data.task=sort",
    "data.task_size=3",
    "train.seq_len=32",
    "train.global_batch_size=16",
    "train.micro_batch_size=4",
    "rl.group_size=4",
    "rl.objective=clip",
    "rl.staleness=2",
    "rollout.max_tokens=5",
    "metrics.rollouts_every=1",
    "parallel.world_size=2",
    "run.kernels=c",
    "run.steps=30",
    "checkpoint.every=4",
)
ASYNCHRONOUS = (*IN_TURN, "rollout.ranks=2")


@pytest.fixture(scope="module")
def in_turn(tmp_path_factory):
    """A run that was never stopped, and whose training ranks sample."""
    folder = tmp_path_factory.mktemp("turn") / "run"
    train(folder, *IN_TURN)
    return folder


@pytest.mark.parametrize("steps", [(6,), (9, 14, 27)])
def test_a_killed_run_resumes_with_the_bits_of_an_uninterrupted_run(in_turn, tmp_path, steps):
    run = tmp_path / "run"
    for step in steps:
        killed = interrupted(run, step, lambda pid: os.killpg(pid, signal.SIGKILL), *ASYNCHRONOUS)
        assert killed.returncode == -signal.SIGKILL
    train(run, *ASYNCHRONOUS)
    assert (run / "rollouts.jsonl").read_text() == (in_turn / "rollouts.jsonl").read_text()
    last = "checkpoints/step-000030"
    assert not differing_tensors(run / last, in_turn / last)
    assert [record["step"] for record in metrics(run)] == list(range(1, 31))


@pytest.mark.parametrize("rank", [0, 3])
def test_a_rank_that_is_killed_is_named(tmp_path, rank):
    words = (*ASYNCHRONOUS, "run.steps=100000", "checkpoint.every=0")
    died = interrupted(tmp_path / "run", 2, lambda pid: os.kill(child_ids(pid)[rank], signal.SIGKILL), *words)
    assert died.returncode == 1
    assert died.stderr.startswith(f"moefold: rank {rank} was killed by SIGKILL (as happens when memory runs out) on ")
    assert died.stderr.count("\n") == 1


def test_a_signal_saves_the_rounds_in_flight_and_the_run_goes_on(in_turn, tmp_path):
    run = tmp_path / "run"
    stopped = interrupted(run, 6, lambda pid: os.kill(pid, signal.SIGTERM), *ASYNCHRONOUS)
    assert stopped.returncode == 128 + signal.SIGTERM
    assert "saved in" in stopped.stdout + stopped.stderr
    train(run, *ASYNCHRONOUS)
    assert (run / "rollouts.jsonl").read_text() == (in_turn / "rollouts.jsonl").read_text()


def test_another_group_size_cannot_continue_the_rounds_in_flight(tmp_path):
    run = tmp_path / "run"
    interrupted(run, 6, lambda pid: os.kill(pid, signal.SIGTERM), *ASYNCHRONOUS)
    done = moefold(*small(run, *ASYNCHRONOUS, "rl.group_size=8"))
    assert done.returncode == 2
    assert "16 a round in groups of 4, and the recipe needs 16 in groups of 8" in done.stderr
