"""Runs that several tests look at."""

from pathlib import Path

import pytest

from tests.e2e.command import FOLDED, fresh, train


@pytest.fixture(scope="session")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twenty steps of one rank that were not interrupted, with one checkpoint at the end."""
    run_dir = tmp_path_factory.mktemp("one") / "run"
    train(run_dir, "checkpoint.every=20")
    return run_dir


@pytest.fixture(scope="session")
def eight_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first four of these steps on eight folded ranks, deterministic, with everything that a run can write."""
    run_dir = tmp_path_factory.mktemp("eight") / "run"
    extras = ("train.eval_every=3", "train.eval_samples=6", "checkpoint.every=3", "metrics.tensorboard=true")
    train(run_dir, "run.deterministic=true", "run.steps=4", *extras, *FOLDED, command=fresh)
    return run_dir
