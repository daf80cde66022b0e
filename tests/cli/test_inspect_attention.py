"""`moefold inspect` on runs with planned attention: work of the busiest rank, moved rows and bytes over time."""

import json

import pytest

from moefold.cli.main import main
from moefold.metrics.metric_curves import read_metric_curves
from tests.cli.unbalanced_run import write_unbalanced_run
from tests.metrics.undefined import undefined


@pytest.fixture
def run_dir(tmp_path):
    """A run of 20 steps whose busiest rank has 1.0 to 1.19 times the mean work; two steps without a valid number."""
    write_unbalanced_run(tmp_path, steps=20)
    path = tmp_path / "metrics.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()]
    for i, record in enumerate(records):
        record |= {"attention_max_over_mean": 1 + i / 100, "attention_moved_rows": 10 * i, "attention_bytes": 4096}
    records[3]["attention_max_over_mean"] = "high"
    records[4]["attention_max_over_mean"] = None
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return tmp_path


def test_the_attention_of_a_run_is_shown(run_dir, capsys):
    curves = {curve.name: curve for curve in read_metric_curves(run_dir)["attention"]}
    assert list(curves) == ["attention_max_over_mean", "attention_moved_rows", "attention_bytes"]
    assert len(curves["attention_max_over_mean"].values) == 18
    assert main(["inspect", str(run_dir)]) == 0
    table = {line[:12].strip(): line[12:].split() for line in capsys.readouterr().out.splitlines()}
    assert table["busiest rank"] == ["1", "1.19", "1", "1.19"]
    assert table["moved rows"] == ["5", "185", "0", "190"]
    assert main(["inspect", str(run_dir), "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert undefined(record, "inspect") == []
    assert record["attention"]["attention_bytes"] == {"start": 4096, "end": 4096, "min": 4096, "max": 4096}


def test_other_runs_have_no_attention(tmp_path, capsys):
    write_unbalanced_run(tmp_path, steps=5)
    assert read_metric_curves(tmp_path)["attention"] == []
    assert main(["inspect", str(tmp_path), "--json"]) == 0
    assert "attention" not in json.loads(capsys.readouterr().out)
