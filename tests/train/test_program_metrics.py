"""Metrics of a program's callbacks: reduced over the ranks, written with the others, refused if not declared."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import moefold
from moefold.config.schema import Config
from moefold.config.sections.metrics import MetricsConfig
from moefold.metrics.definitions import REDUCTIONS
from tests.docs.extending_page import register
from tests.train.tiny_runs import recipe


class Ranks(moefold.Callback):
    """Measures the number of the rank, from 1, and nothing in the second step."""

    metrics = tuple(moefold.Metric(f"rank_{name}", "", "number of the rank", reduce=name) for name in REDUCTIONS)

    def measure(self, run, step):
        rank = run.groups.rank + 1.0
        return {metric.name: rank if step.number == 1 else None for metric in self.metrics}


class Undeclared(moefold.Callback):
    """Measures an undeclared metric."""

    metrics = (moefold.Metric("declared", "", "a number"),)

    def measure(self, run, step):
        return {"declared": 1.0, "loss": 2.0}


def _train(cfg: Config) -> None:
    assert moefold.train_in_process(cfg, callbacks=[Ranks()]).status == 0


def _lines(run_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parity
def test_the_values_of_the_ranks_become_one(pool, tmp_path: Path):
    cfg = recipe(tmp_path / "two", 2, every=0, world_size=2)
    pool.run(2, _train, replace(cfg, run=replace(cfg.run, dir=str(tmp_path / "two"))))
    expected = {"rank_": 1.0, "rank_sum": 3.0, "rank_mean": 1.5, "rank_max": 2.0, "rank_min": 1.0}
    first, second = _lines(tmp_path / "two")
    assert {name: first[name] for name in expected} == expected
    assert {name: second[name] for name in expected} == dict.fromkeys(expected)


def test_the_example_of_the_page_measures(tmp_path: Path):
    register("A metric")
    cfg = replace(recipe(tmp_path / "run", 1, every=0), metrics=MetricsConfig(tensorboard=True))
    moefold.train_in_process(cfg, callbacks=[sys.modules["extension"].MaskedTokens()])
    [line] = _lines(tmp_path / "run")
    assert line["most_masked"] == line["least_masked"] < 1
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "run/tensorboard")).Reload()
    assert events.Scalars("program/most_masked")[0].value == pytest.approx(line["most_masked"])


def test_a_name_that_is_not_declared_is_refused(tmp_path: Path):
    with pytest.raises(moefold.RunError, match="the metric 'loss', which `measure` of the callback Undeclared"):
        moefold.train_in_process(recipe(tmp_path, 1, every=0), callbacks=[Undeclared()])


@pytest.mark.parametrize(
    ("metric", "message"),
    [
        (moefold.Metric("loss", "", "mine"), "the metric 'loss' of a callback exists already; give it another name"),
        (moefold.Metric("rl.reward", "", "mine"), "the metric 'rl.reward' of a callback must have a name of letters"),
        (
            {"loss": 1.0},
            "holds {'loss': 1.0}, which is not a moefold.Metric; .* another kind another name",
        ),
        (moefold.Metric("mine", "", "", reduce="median"), "reduce='median', which must be one of '', 'sum', 'mean'"),
    ],
)
def test_a_definition_that_cannot_be_is_refused_before_ranks_start(tmp_path: Path, metric, message: str):
    callback = moefold.Callback()
    callback.metrics = (metric,)
    with pytest.raises(moefold.ConfigError, match=message):
        moefold.train_in_process(recipe(tmp_path, 1, every=0), callbacks=[callback])


class WithoutDefinition(moefold.Callback):
    """Measures, and declares nothing."""

    def measure(self, run, step):
        return {"mine": 1.0}


def test_a_callback_that_measures_an_undefined_metric_is_refused(tmp_path: Path):
    with pytest.raises(moefold.RunError, match="the metric 'mine', which `measure` of the callback WithoutDefinition"):
        moefold.train_in_process(recipe(tmp_path, 1, every=0), callbacks=[WithoutDefinition()])


@pytest.mark.parametrize("callbacks", [["x"], WithoutDefinition(), [WithoutDefinition]], ids=["text", "one", "class"])
def test_a_value_that_is_not_a_list_of_callbacks_is_refused(tmp_path: Path, callbacks):
    with pytest.raises(moefold.ConfigError, match=r"must be a list of objects .*, such as callbacks=\[LossLog\(\)\]"):
        moefold.train_in_process(recipe(tmp_path, 1, every=0), callbacks=callbacks)


@pytest.mark.parametrize("metrics", [moefold.Metric("mine", "", ""), "mine"], ids=["one", "text"])
def test_metrics_of_a_callback_that_are_not_a_list_are_refused(tmp_path: Path, metrics):
    callback = moefold.Callback()
    callback.metrics = metrics
    with pytest.raises(moefold.ConfigError, match="`metrics` of the callback Callback is .*, and must be a list of"):
        moefold.train_in_process(recipe(tmp_path, 1, every=0), callbacks=[callback])
