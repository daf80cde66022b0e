"""`moefold plan-accuracy` from the command line."""

import json
from pathlib import Path

import pytest

from moefold.cli.main import main

TABLE = Path(__file__).parents[1] / "planner" / "published" / "calibration.csv"


@pytest.fixture
def short_table(tmp_path):
    lines = TABLE.read_text().splitlines()
    path = tmp_path / "short.csv"
    path.write_text("\n".join([*lines[:9], lines[27]]) + "\n")
    return path


def test_json_is_one_object(short_table, capsys):
    assert main(["plan-accuracy", str(short_table), "--json"]) == 0
    tree = json.loads(capsys.readouterr().out)
    assert len(tree["rows"]) == 8
    assert tree["rows"][5]["measured"] == tree["rows"][5]["predicted"] == "OOM"
    assert tree["rows"][5]["error_pct"] is None
    assert tree["num_skipped"] == 1
    assert 0 < tree["mean_abs_error_pct"] < 20


def test_table_lists_skipped_mappings(short_table, capsys):
    assert main(["plan-accuracy", str(short_table)]) == 0
    text = capsys.readouterr().out
    assert "skipped 1 rows" in text
    assert "mean absolute error" in text
    assert "unseen" in text


def test_a_file_that_is_not_there_is_one_message(capsys):
    assert main(["plan-accuracy", "absent.csv"]) == 2
    assert "absent.csv" in capsys.readouterr().err
