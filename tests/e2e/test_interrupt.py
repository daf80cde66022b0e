"""Test that after signals, kills and crashes one message names the cause, and the same command continues."""

import os
import re
import signal
import time

import pytest

from moefold.checkpoint.find_checkpoint import complete_checkpoints
from tests.e2e.agents import MOEFOLD
from tests.e2e.command import (
    ROOT,
    TWO,
    checkpoints,
    child_ids,
    environment,
    interrupted,
    losses,
    metrics,
    moefold,
    small,
    train,
    wait_until_gone,
)
from tests.e2e.forked import start_program
from tests.slow import slow

pytestmark = pytest.mark.e2e

SAVES = ("checkpoint.every=1000",)


def test_ctrl_c_and_sigterm_save_and_the_same_command_resumes(one_rank, tmp_path):
    run_dir, words = tmp_path / "run", ("checkpoint.every=1000",)

    stopped = interrupted(run_dir, 3, lambda pid: os.killpg(pid, signal.SIGINT), *words, *TWO)
    assert stopped.returncode == 130, stopped.stderr
    assert stopped.stderr == "\nmoefold: finishing the step; press Ctrl-C again to abandon it\n"
    first = len(losses(run_dir))
    assert stopped.stdout.splitlines()[-1].startswith(f"stopped by SIGINT after step {first} of 20")
    assert checkpoints(run_dir) == [f"step-{first:06d}"]

    stopped = interrupted(run_dir, first + 3, lambda pid: os.kill(pid, signal.SIGTERM), *words, *TWO)
    assert stopped.returncode == 143, stopped.stderr
    assert stopped.stderr == ""
    assert f"at step {first}\n" in stopped.stdout
    second = len(losses(run_dir))

    stopped = interrupted(run_dir, second + 2, lambda pid: os.kill(pid, signal.SIGTERM), *words)
    assert stopped.returncode == 143, stopped.stderr
    assert checkpoints(run_dir)[-1] == f"step-{len(losses(run_dir)):06d}"

    train(run_dir, *words)
    assert losses(run_dir) == pytest.approx(losses(one_rank), rel=1e-4)


@pytest.mark.parametrize("words", [TWO, *slow([((),)])], ids=["two ranks", "one rank"])
def test_a_closed_terminal_saves(tmp_path, words):
    run_dir = tmp_path / "run"
    stopped = interrupted(run_dir, 3, lambda pid: os.killpg(pid, signal.SIGHUP), "run.steps=100000", *SAVES, *words)
    assert stopped.returncode == 128 + signal.SIGHUP, stopped.stderr
    assert stopped.stdout.splitlines()[-1].startswith(f"stopped by SIGHUP after step {len(losses(run_dir))} of 100000")
    assert checkpoints(run_dir) == [f"step-{len(losses(run_dir)):06d}"]


@pytest.mark.parametrize("words", [TWO, *slow([((),)])], ids=["two ranks", "one rank"])
def test_closed_output_pipe_saves_and_reports_it(tmp_path, words):
    run_dir, pipe, errors = tmp_path / "run", tmp_path / "pipe", tmp_path / "errors"
    os.mkfifo(pipe)
    process = start_program(
        MOEFOLD, small(run_dir, "run.steps=100", *SAVES, *words), [pipe, errors], ROOT, environment()
    )
    with pipe.open() as printed:
        assert any(line.startswith("step ") for line in printed)
    process.join(100)
    message = errors.read_text()
    steps = len(losses(run_dir))
    assert process.exitcode == 128 + signal.SIGPIPE, message
    assert message.startswith(f"moefold: stopped by SIGPIPE after step {steps} of 100; saved in ")
    assert message.count("\n") == 1
    assert checkpoints(run_dir) == [f"step-{steps:06d}"]


@pytest.mark.slow
def test_kill_and_resume_under_another_mapping_equals_the_uninterrupted_run(one_rank, tmp_path):
    run_dir, words = tmp_path / "run", ("checkpoint.every=5", "checkpoint.keep=2")
    folded = ("parallel.world_size=4", "parallel.tp=2", "parallel.pp=2", "parallel.ep=2")
    killed = interrupted(run_dir, 12, lambda pid: os.killpg(pid, signal.SIGKILL), *words, *folded)
    assert killed.returncode == -signal.SIGKILL
    done = train(run_dir, *words, "parallel.world_size=2", "parallel.cp=2", "parallel.etp=2", "parallel.zero=3")
    assert "step-000010 at step 10; " in done.stdout
    assert "of metrics.jsonl beyond it removed" in done.stdout
    assert [record["step"] for record in metrics(run_dir)] == list(range(1, 21))
    assert losses(run_dir) == pytest.approx(losses(one_rank), rel=1e-4)
    assert checkpoints(run_dir) == ["step-000015", "step-000020"]


def test_rank_that_is_killed_is_named_in_one_message(tmp_path):
    words = ("run.steps=100000", "parallel.world_size=4", "parallel.tp=2", "parallel.ep=2")
    died = interrupted(tmp_path / "run", 3, lambda pid: os.kill(child_ids(pid)[2], signal.SIGKILL), *words)
    assert died.returncode == 1
    assert died.stderr.startswith("moefold: rank 2 was killed by SIGKILL (as happens when memory runs out) on ")
    assert re.search(
        r" in step \d+, .*; last collective \w+ over .* \(ranks .*\), shape \[.*\], and the others", died.stderr
    )
    assert died.stderr.count("\n") == 1


def test_ranks_end_with_their_launcher(tmp_path):
    ranks: list[int] = []

    def kill_launcher(process_id: int) -> None:
        ranks.extend(child_ids(process_id))
        os.kill(process_id, signal.SIGKILL)
        wait_until_gone(process_id)

    words = ("run.steps=100000", "checkpoint.every=100000")
    interrupted(tmp_path / "run", 3, kill_launcher, *words, *TWO)
    assert len(ranks) == 2
    assert checkpoints(tmp_path / "run") == [f"step-{len(losses(tmp_path / 'run')):06d}"]


def test_a_second_job_in_the_same_folders_is_refused(tmp_path):
    run_dir, saved = tmp_path / "run", tmp_path / "saved"
    words = ("run.steps=100000", "checkpoint.every=3", f"checkpoint.dir={saved}")
    refused = []

    def start_others(first: int) -> None:
        # Its locks are its own while it stands still, and it takes no time from the others.
        os.kill(first, signal.SIGSTOP)
        for folder in (run_dir, tmp_path / "other"):
            # It waits for half of this time.
            refused.append(moefold(*small(folder, *words, "faults.timeout_s=4")))
        os.kill(first, signal.SIGCONT)
        before = len(losses(run_dir))
        while len(losses(run_dir)) < before + 6:
            time.sleep(0.05)
        os.kill(first, signal.SIGTERM)

    done = interrupted(run_dir, 7, start_others, *words)
    assert done.returncode == 143, done.stderr
    for other, folder in zip(refused, (f"run.dir={str(run_dir)!r}", f"checkpoint.dir={str(saved)!r}"), strict=True):
        assert other.returncode == 2
        assert f"{folder} is in use by another job (process " in other.stderr.splitlines()[-1]
    steps = [record["step"] for record in metrics(run_dir)]
    assert steps == list(range(1, len(losses(run_dir)) + 1))
    assert complete_checkpoints(saved)[-1].name == f"step-{steps[-1]:06d}"
