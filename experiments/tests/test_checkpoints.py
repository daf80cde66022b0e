"""Checkpoints with other states than the moments of AdamW: resumed bit by bit, and refused for other optimizers."""

from dataclasses import replace
from itertools import pairwise

import pytest

from moefold.checkpoint.checkpoint_meta import read_meta
from moefold.checkpoint.stored_tensors import differing_tensors
from moefold_experiments.gradient_delay.part import DelayedAdamW, DelayedMuon
from moefold_experiments.spsa.part import Spsa
from tests.checkpoint.broken_checkpoints import load_error, recipe, save_broken
from tests.slow import slow
from tests.train import tiny_runs

pytestmark = pytest.mark.parity


@pytest.mark.parametrize("optimizer", [DelayedAdamW(correction=1.0), *slow([(DelayedMuon(correction=1.0),)])], ids=str)
def test_a_resume_with_a_pending_gradient_gives_the_same_bits(pool, tmp_path, optimizer):
    """From the step that updates no weight, and from a later one."""
    train = {"optimizer": optimizer}
    pool.run(
        2,
        tiny_runs.train_rank,
        tiny_runs.recipe(tmp_path / "whole", 4, every=1, train=train, world_size=2, ep=2, zero=3),
    )
    saved = [tmp_path / "whole" / "checkpoints" / f"step-{step:06d}" for step in (1, 2, 3, 4)]
    weights = [{difference.name for difference in differing_tensors(*pair, "model.")} for pair in pairwise(saved)]
    assert all("embedding.weight" in " ".join(names) for names in weights)
    assert [read_meta(path).state_of("weights")["moment_updates"] for path in saved] == [0, 1, 2, 3]
    for first in (saved[0], saved[2]):
        cfg = tiny_runs.recipe(tmp_path / first.name, 4, every=4, train=train, world_size=2, ep=2, zero=3)
        pool.run(2, tiny_runs.train_rank, replace(cfg, checkpoint=replace(cfg.checkpoint, resume=str(first))))
        assert differing_tensors(saved[3], tmp_path / first.name / "checkpoints" / saved[3].name) == []


def test_states_that_an_optimizer_would_drop_are_refused(pool, tmp_path):
    """Tensors left of them may have another meaning: the moment of AdamW is not the moment of Lion."""
    pool.run(1, save_broken, recipe(tmp_path, train={"optimizer": DelayedAdamW()}), "", "")
    (error,) = pool.run(1, load_error, recipe(tmp_path))
    assert "is of another optimizer, it also has optimizer." in error
    assert ".pending_gradient" in error
    assert "more; set train.optimizer and train.optimizer.groups" in error


def test_states_that_are_not_there_are_refused(pool, tmp_path):
    pool.run(1, save_broken, recipe(tmp_path), "", "")
    (error,) = pool.run(1, load_error, recipe(tmp_path, train={"optimizer": DelayedAdamW()}))
    assert "it has other moments instead of pending_gradient of optimizer." in error


def test_moments_that_an_optimizer_does_not_have_are_refused(pool, tmp_path):
    spsa = recipe(tmp_path / "spsa", train={"optimizer": Spsa()})
    adamw = recipe(tmp_path / "adamw")
    for saved, loaded, has in ((spsa, adamw, "it has no moments"), (adamw, spsa, "it has moments")):
        pool.run(1, save_broken, saved, "", "")
        (error,) = pool.run(1, load_error, replace(loaded, run=saved.run))
        assert f"is of another optimizer, {has}; set train.optimizer as it was, or begin a new run" in error
