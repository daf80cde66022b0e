"""The row of a run comes from the last lines of its metrics, whatever stands before them."""

import json
import math
import os

import pytest

from moefold.board import json_tail
from moefold.board.json_tail import NewestValues


def line(step: int, **values) -> str:
    return json.dumps({"step": step, "eval_loss": None} | values) + "\n"


def opened(path) -> NewestValues:
    newest = NewestValues(path)
    newest.read()
    return newest


def value(newest: NewestValues, name: str) -> float | None:
    found = newest.value(name)
    return None if found is None else found.value


@pytest.mark.parametrize(
    ("content", "step", "is_cut"),
    [
        ("", 0, False),
        ('{"step": 1}', 0, True),
        ('{"step": 1}\n', 1, False),
        ('{"step": 1}\n{"step": 2', 1, True),
        ('{"step": 1}\nx\n[]\n{"step": "a"}\n', 1, False),
        ("x" * json_tail.LAST_BYTES + '\n{"step": 5}\n', 5, False),
        ('{"step": 1}\n"' + "x" * json_tail.LAST_BYTES, 0, True),
    ],
)
def test_the_last_line_that_is_a_step(tmp_path, content, step, is_cut):
    path = tmp_path / "metrics.jsonl"
    path.write_text(content)
    newest = opened(path)
    assert (newest.step, newest.is_cut) == (step, is_cut)


def test_a_path_without_a_regular_file_has_no_values(tmp_path):
    assert opened(tmp_path / "nothing").step == 0
    os.mkfifo(tmp_path / "metrics.jsonl")
    assert opened(tmp_path / "metrics.jsonl").step == 0


def test_values_of_the_last_line_and_the_newest_evaluation(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(line(1, eval_loss=3.0) + line(2, loss=2.5, rl={"reward": 0.5}, tokens_per_s=10))
    newest = opened(path)
    assert [value(newest, name) for name in json_tail.NAMES] == [2.5, 3.0, 0.5, 10.0]
    with path.open("a") as file:
        file.write(line(3, loss=None, nonfinite={"loss": "nan"}))
    newest.read()
    assert (newest.step, value(newest, "eval_loss"), value(newest, "tokens_per_s")) == (3, 3.0, None)
    assert math.isnan(newest.value("loss").value)
    with path.open("a") as file:
        file.write(line(4, loss=1.0, nonfinite={"eval_loss": "inf"}))
    newest.read()
    assert math.isnan(newest.value("eval_loss").value)


def test_an_evaluation_far_from_the_end_is_found_once_and_kept(tmp_path):
    path = tmp_path / "metrics.jsonl"
    filler = "x" * 2000
    path.write_text(
        line(1, eval_loss=9.0) + line(2, eval_loss=3.0) + "".join(line(i, text=filler) for i in range(3, 400))
    )
    newest = opened(path)
    assert (newest.step, newest.value("eval_loss").step, value(newest, "eval_loss")) == (399, 2, 3.0)
    with path.open("a") as file:
        file.write(line(400))
    newest.read()
    assert (newest.step, value(newest, "eval_loss")) == (400, 3.0)
    # The run goes back to step 1: later values are void.
    path.write_text(line(1, eval_loss=9.0))
    newest.read()
    assert (newest.step, value(newest, "eval_loss")) == (1, 9.0)
    path.unlink()
    newest.read()
    assert (newest.step, value(newest, "eval_loss")) == (0, None)
