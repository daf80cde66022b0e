"""`moefold plan-accuracy` from the command line."""

import json
from pathlib import Path

import pytest

from moefold.cli.main import main
from moefold.cli.plan_accuracy import row_reader
from moefold.planner.accuracy import predict_own_run

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


def test_other_software_is_priced_where_the_folder_is_a_checkout(tmp_path):
    assert row_reader(tmp_path) is predict_own_run
    reader = row_reader(Path(__file__).parents[2])
    assert (reader.__module__, reader.__name__) == ("benchmarks.published.predictions", "predict_row")


def test_a_run_of_moefold_is_printed_with_the_stated_error(tmp_path, capsys):
    path = tmp_path / "own.csv"
    path.write_text(
        TABLE.read_text().splitlines()[0]
        + "\nmine,mixtral-8x7b,h100,64,bf16,4096,256,1,2,1,1,8,1,1,tokens_per_s_per_gpu,4000,moefold zero=1,\n"
    )
    assert main(["plan-accuracy", str(path)]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "expected: published runs that a fit did not see" in text
    assert "skipped 0 rows" in text
