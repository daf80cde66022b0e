"""The definitions cover exactly the numbers that a run writes and shows; the page is current."""

import math
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
import torch

from moefold.data.prompts import Prompt
from moefold.errors import RunError
from moefold.metrics.definitions import (
    GROUPS,
    LAYER_CURVES,
    LINE,
    MISREAD,
    SHOWN,
    Metric,
    definitions_text,
    measured,
    reduced,
    step_values,
)
from moefold.metrics.expert_balance import LayerSummary
from moefold.metrics.step_line import StepLine
from moefold.metrics.step_metrics import MoELayerMetrics, ReplicaMetrics, offload_metrics, rank_time_metrics
from moefold.metrics.writer import to_record
from moefold.parallel.memory_tracking import MemoryByPart
from moefold.rl.rollout import Rollout, RolloutGroup
from moefold.rl.round_statistics import RoundStatistics
from tests.metrics.example import LAYER, MEMORY, STEP
from tests.metrics.undefined import undefined
from tests.objectives.losses import policy, preference
from tools.metrics_page import metrics_page

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"
NAMES = {group.prefix: [one.name for one in group.metrics] for group in GROUPS}


def test_the_page_is_current():
    assert PAGE.read_text(encoding="utf-8") == metrics_page(), "run: python -m tools.metrics_page > docs/metrics.md"


@pytest.mark.parametrize(
    ("prefix", "record"),
    [
        ("moe_layers.", MoELayerMetrics),
        ("replicas.", ReplicaMetrics),
    ],
)
def test_each_field_of_a_record_has_one_definition_in_its_order(prefix, record):
    assert NAMES[prefix] == [field.name for field in fields(record)]


def test_each_number_of_times_and_offload_has_one_definition_in_its_order():
    assert NAMES["offload."] == list(offload_metrics((1.0, 1.0, 1.0, 1.0), 1))
    assert NAMES["rank_times."] == list(rank_time_metrics(np.ones((1, 3))) or {})


def test_each_number_of_a_step_has_one_definition():
    assert set(NAMES[""]) == {*STEP, "nonfinite"}
    assert NAMES["memory_by_part."][:2] == [field.name for field in fields(MemoryByPart)]
    layers = [name.removeprefix("layers.") for name in NAMES["inspect."] if name.startswith("layers.")]
    assert layers == [field.name for field in fields(LayerSummary)]


def test_metrics_of_losses_and_rollouts_are_those_that_are_computed():
    rollout = Rollout(0, 0, np.zeros(2, np.int64), np.zeros(3, np.int64), np.zeros(3), "eos")
    group = RolloutGroup(Prompt("p", "p", (1, 2)), (rollout,), np.ones(1), np.ones(1))
    computed = set(RoundStatistics().add([group], 1.0, 1.0).metrics([group]))
    by_loader = {"staleness", "rollout_wait_s", "eval_reward"}
    assert set(NAMES["rl."]) == computed | by_loader | {metric.name for metric in policy().metrics}
    methods = [preference(method=method).method for method in ("dpo", "kto")]
    assert set(NAMES["loss_metrics."]) == {name for method in methods for name in method.mean_metrics} | {"*"}


def test_shown_numbers_are_in_the_record():
    assert set(SHOWN) <= {prefix + name for prefix, names in NAMES.items() for name in names}
    assert set(LAYER_CURVES) == set(NAMES["moe_layers."]) - {"layer"}
    assert {column.path for column in LINE} - {""} <= set(SHOWN)


def test_a_number_without_a_definition_is_refused_by_its_name():
    with pytest.raises(RunError, match="the metric 'flops' has no definition; add it to metrics/definitions.toml"):
        step_values({"loss": 1.0, "flops": 1.0})


def test_a_measured_value_is_a_number_of_any_library_or_refused():
    metrics = [Metric("one", "", "a number")]
    for value in (1.5, torch.tensor(1.5), torch.tensor([1.5]), np.float32(1.5)):
        found = measured(metrics, {"one": value}, "Mine")["one"]
        assert type(found) is float
        assert found == 1.5
    assert measured(metrics, {"one": None}, "Mine") == {"one": None}
    for value in ("1.5", [1, 2], torch.ones(2), 10**400):
        with pytest.raises(RunError, match="the metric 'one', which .* returned, is .*, no number; return a float"):
            measured(metrics, {"one": value}, "Mine")
    for values in (None, [1.0], 2.0):
        with pytest.raises(RunError, match="`measure` of the callback Mine returned .*; return a dict of numbers by"):
            measured(metrics, values, "Mine")


@pytest.mark.parametrize("reduce", ["sum", "mean", "max", "min"])
@pytest.mark.parametrize("values", [(1.0, math.nan), (math.nan, 1.0)])
def test_nan_of_a_rank_makes_the_result_nan(reduce, values):
    ranks = [{"one": value} for value in values]
    assert math.isnan(reduced([Metric("one", "", "a number", reduce=reduce)], ranks)["one"])


def test_infinities_of_both_signs_have_extremes_and_no_sum():
    ranks = [{"one": math.inf}, {"one": -math.inf}, {"one": None}]
    found = {
        name: reduced([Metric("one", "", "", reduce=name)], ranks)["one"] for name in ("sum", "mean", "max", "min")
    }
    assert math.isnan(found["sum"])
    assert math.isnan(found["mean"])
    assert (found["max"], found["min"]) == (math.inf, -math.inf)


def test_each_word_of_the_line_of_a_step_is_defined():
    pairs = {"accuracy": 0.5, "margin": 0.25}
    step = STEP | {"indexer_loss": 0.5, "rl": {"reward": 0.25}, "loss_metrics": pairs, "dropped_fraction": 0.5}
    step = step | {"moe_layers": (LAYER,)}
    steps = (step, step | {"mfu": 0.5})
    lines = [StepLine(100, is_gpu=True, evaluates=True).columns(one, 2.5, 60.0) for one in steps]
    parts = [text for columns in lines for text in columns.values()]
    words = {part: [name for name in NAMES["log."] if name in part] for part in parts}
    assert all(words.values()), words
    others = {"parameters", "active for each token", "tokens to train on", "checkpointing blocked training"}
    assert {name for names in words.values() for name in names} == set(NAMES["log."]) - others


def test_a_record_with_an_unknown_name_is_found():
    record = to_record(STEP | {"memory_by_part": MEMORY, "moe_layers": (LAYER,)})
    assert undefined(record) == []
    record["moe_layers"][0]["guess"] = 1
    record["rl"] = {"reward": 1.0, "rewards": {"reward.py:f": 1.0}, "prize": 1.0}
    assert undefined(record | {"flops": 1}) == ["moe_layers.guess", "rl.prize", "flops"]
    assert undefined({"layers": [{"share": 1}], "rl": {"reward": {"start": 1, "stop": 1}}}, "inspect") == [
        "inspect.rl.reward.stop"
    ]


def test_the_terminal_has_the_same_definitions():
    text = definitions_text()
    for group in GROUPS:
        assert all(one.counts in text for one in group.metrics)
        assert len({one.name for one in group.metrics}) == len(group.metrics)
    assert all(line in text and line in PAGE.read_text(encoding="utf-8") for line in MISREAD)
