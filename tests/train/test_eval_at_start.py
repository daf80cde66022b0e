"""Evaluation before the first step: the loss of the initial weights, in a line that every reader of a run takes."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

import moefold
from moefold.board.run_finder import FoundRun
from moefold.board.run_reader import RunReader
from moefold.metrics.expert_balance import read_balance
from moefold.metrics.plot import plot_loss, read_curves
from tests.train.tiny_runs import recipe


def _train(run_dir: Path, steps: int) -> list[dict]:
    cfg = recipe(run_dir, steps, every=1)
    cfg = replace(cfg, train=replace(cfg.train, eval_every=1, eval_samples=4, eval_at_start=True))
    assert moefold.train_in_process(cfg).status == 0
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def test_the_initial_weights_are_evaluated_once_and_every_reader_takes_the_line(tmp_path: Path, capfd):
    """A resumed run keeps the line, and evaluation changes no step."""
    first = _train(tmp_path / "run", 1)
    assert list(first[0]) == ["step", "eval_loss"]
    assert first[0]["step"] == 0
    # A rate of 0 in the step of warm-up would leave the weights; here the loss of the second evaluation differs.
    assert first[0]["eval_loss"] != first[1]["eval_loss"]
    lines = _train(tmp_path / "run", 2)
    assert lines[:2] == first
    assert [line["step"] for line in lines] == [0, 1, 2]
    assert "train.eval_at_start: the run has begun" not in capfd.readouterr().out
    cfg = recipe(tmp_path / "other", 2, every=0)
    moefold.train_in_process(cfg)
    other = [json.loads(line) for line in (tmp_path / "other" / "metrics.jsonl").read_text().splitlines()]
    assert [line["loss"] for line in lines[1:]] == [line["loss"] for line in other]

    curves = read_curves(tmp_path / "run")
    assert (curves.steps, curves.eval_steps) == ([1, 2], [0, 1, 2])
    plot_loss(tmp_path / "run")
    assert read_balance(tmp_path / "run").steps.tolist() == [1, 2]
    reader = RunReader(FoundRun(tmp_path / "run", "run"))
    reader.read()
    assert reader.series()["series"]["eval_loss"]["steps"] == [0, 1, 2]
    assert reader.summary()["problems"] == []


def test_a_run_that_began_without_it_says_that_nothing_is_evaluated(tmp_path: Path, capfd):
    moefold.train_in_process(recipe(tmp_path / "run", 1, every=1))
    assert [line["step"] for line in _train(tmp_path / "run", 2)] == [1, 2]
    assert "train.eval_at_start: the run has begun without it" in capfd.readouterr().out


@pytest.mark.parametrize("words", [("train.eval_every=0",), ("rl.group_size=4", "train.eval_every=1")])
def test_it_is_refused_where_nothing_is_evaluated(words: tuple[str, ...]):
    with pytest.raises(moefold.ConfigError, match="train.eval_at_start"):
        moefold.check_config(moefold.load_config(None, ["model.preset=tiny", "train.eval_at_start=true", *words]))
