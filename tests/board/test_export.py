"""A static export has all that the page asks for, and replaces no other folder."""

import json

import numpy as np
import pytest

from moefold.board.export import export_board
from moefold.board.metric_table import MAX_MEAN_POINTS, WEIGHTS, exponential_mean
from moefold.board.page import STATIC_FILES
from moefold.board.run_list import RunList
from moefold.errors import ConfigError
from tests.board.run_files import write_faults, write_rollouts, write_run


def exported(folder) -> dict:
    text = (folder / "data.js").read_text(encoding="ascii")
    assert text.startswith("window.MOEFOLD_BOARD = ")
    return json.loads(text.removeprefix("window.MOEFOLD_BOARD = ").removesuffix(";\n"))


def test_an_export_has_the_page_and_the_answers(tmp_path):
    write_run(tmp_path / "runs/one", 12)
    write_rollouts(tmp_path / "runs/one")
    write_faults(tmp_path / "runs/one")
    write_run(tmp_path / "runs/two", 3)
    assert export_board(RunList([tmp_path / "runs"]), tmp_path / "out/board") == ["one", "two"]
    folder = tmp_path / "out/board"
    assert sorted(path.name for path in folder.iterdir()) == ["data.js", "index.html", "static"]
    assert sorted(path.name for path in (folder / "static").iterdir()) == sorted(STATIC_FILES)
    assert '<script src="data.js"></script>' in (folder / "index.html").read_text()
    data = exported(folder)
    one, two = data["runs"]
    assert (one["name"], one["step"], two["step"]) == ("one", 12, 3)
    assert one["style"] != two["style"]
    answers = data["data"][one["key"]]
    assert answers["series"]["series"]["loss"]["steps"] == list(range(1, 13))
    assert len(answers["rollouts"]["rollouts"]) == 6
    assert set(answers) == {"series", "experts", "memory", "ranks", "faults", "rollouts", "recipe"}
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["board"]


def test_a_long_run_is_exported_whole_with_its_extremes(tmp_path, monkeypatch):
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    with (run_dir / "metrics.jsonl").open("w") as file:
        for step in range(1, 5001):
            file.write(json.dumps({"step": step, "loss": 99.0 if step == 3333 else 1 / step}) + "\n")
    monkeypatch.setattr("moefold.board.json_tail.MAX_READ_BYTES", 10_000)
    export_board(RunList([run_dir]), tmp_path / "board")
    (answers,) = exported(tmp_path / "board")["data"].values()
    loss = answers["series"]["series"]["loss"]
    assert len(loss["steps"]) <= 3002 + len(WEIGHTS) * MAX_MEAN_POINTS
    assert (loss["steps"][-1], max(loss["values"])) == (5000, 99.0)
    # Means over every step; an export has only a part of the steps.
    (spike,) = np.flatnonzero(np.array(loss["values"]) == 99.0)
    values = np.array([99.0 if step == 3333 else 1 / step for step in range(1, 5001)])
    for weight in WEIGHTS:
        mean = exponential_mean(np.arange(1, 5001), values, float(weight))
        assert loss["smoothed"][weight][spike] == pytest.approx(mean[3332], rel=1e-6)


def test_other_folders_are_not_replaced(tmp_path):
    runs = RunList([write_run(tmp_path / "run", 1)])
    board = tmp_path / "board"
    export_board(runs, board)
    with pytest.raises(ConfigError, match=r"exists already; add --force to replace it, or name another folder"):
        export_board(runs, board)
    (board / "index.html").write_text("earlier page")
    export_board(runs, board, force=True)
    assert "earlier page" not in (board / "index.html").read_text()
    with pytest.raises(ConfigError, match=r"exists and is not an export of a board; name another folder"):
        export_board(runs, tmp_path / "run", force=True)
    assert (tmp_path / "run/metrics.jsonl").exists()
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"--export .*file/board cannot be written: (Not a directory|File exists)"):
        export_board(runs, tmp_path / "file/board")
