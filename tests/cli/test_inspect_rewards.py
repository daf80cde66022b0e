"""`moefold inspect` on runs of reinforcement learning: rewards, lengths, entropy and mismatch over time."""

import json

import pytest

from moefold.cli.inspect import print_curves
from moefold.cli.main import main
from moefold.metrics.metric_curves import read_metric_curves
from tests.cli.unbalanced_run import write_unbalanced_run
from tests.metrics.undefined import undefined


@pytest.fixture
def run_dir(tmp_path):
    """A run of 40 steps whose reward rises from 0 to 0.975, with an evaluation every 10 steps."""
    write_unbalanced_run(tmp_path, steps=40)
    path = tmp_path / "metrics.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()]
    for i, record in enumerate(records):
        record["rl"] = {
            "reward": i / 40,
            "eval_reward": i / 40 if i % 10 == 9 else None,
            "length_mean": 20.0 - i / 4,
            "entropy": 2.0,
            "mismatch_mean": 1e-3 * (i % 2),
            "truncated": 0.5,
        }
    # A value of another type, and a line that was cut off.
    records[3]["rl"]["reward"] = "high"
    path.write_text("".join(json.dumps(record) + "\n" for record in records) + '{"step": 41, "rl"')
    return tmp_path


def test_curves_are_read_from_the_metrics(run_dir):
    curves = {curve.name: curve for curve in read_metric_curves(run_dir)["rl"]}
    assert list(curves) == ["reward", "eval_reward", "length_mean", "entropy", "mismatch_mean"]
    assert curves["eval_reward"].steps.tolist() == [10, 20, 30, 40]
    assert len(curves["reward"].values) == 39
    assert curves["length_mean"].summary() == {
        "start": pytest.approx(19.625),
        "end": pytest.approx(10.625),
        "min": 10.25,
        "max": 20.0,
    }
    steps, values = curves["entropy"].binned(4)
    assert steps.tolist() == [5.5, 15.5, 25.5, 35.5]
    assert values.tolist() == [2.0] * 4


def test_the_table_and_the_rows(run_dir, capsys):
    assert main(["inspect", str(run_dir)]) == 0
    lines = capsys.readouterr().out.splitlines()
    table = {line[:22].strip(): line[22:].split() for line in lines}
    assert table["reward"] == ["0.025", "0.95", "0", "0.975"]
    assert table["entropy, nats"] == ["2", "2", "2", "2"]
    rows = {line[:16].strip(): line[18:] for line in lines if line[16:18] == "  "}
    assert rows["reward"][0] in "▁."
    assert rows["reward"][-1] in "█@"
    assert list(rows["length, tokens"]) == sorted(rows["length, tokens"], key="█▇▆▅▄▃▂▁@#*+=-:.".index)


def test_json_has_the_ends_of_each_curve(run_dir, capsys):
    assert main(["inspect", str(run_dir), "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert undefined(record, "inspect") == []
    found = record["rl"]
    assert found["eval_reward"] == {"start": 0.225, "end": 0.975, "min": 0.225, "max": 0.975}


def test_the_picture_has_a_row_of_rewards(run_dir, tmp_path, capsys):
    assert main(["inspect", str(run_dir), "--picture", str(tmp_path / "with.svg")]) == 0
    text = (tmp_path / "with.svg").read_text()
    for title in ("reward", "length, tokens", "entropy, nats", "mismatch, nats", "held out, greedy"):
        assert f"<!-- {title} -->" in text


def test_other_runs_have_no_curves(tmp_path, capsys):
    write_unbalanced_run(tmp_path)
    assert read_metric_curves(tmp_path)["rl"] == []
    assert main(["inspect", str(tmp_path), "--json"]) == 0
    assert "rl" not in json.loads(capsys.readouterr().out)
    print_curves(None, "reinforcement learning", [])


def test_preferences_have_their_accuracy_and_margin(tmp_path, capsys):
    write_unbalanced_run(tmp_path, steps=20)
    path = tmp_path / "metrics.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()]
    for i, record in enumerate(records):
        record["loss_metrics"] = {"accuracy": 0.5 + i / 40, "margin": -0.25, "own": 7.0}
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    assert main(["inspect", str(tmp_path)]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["accuracy", "0.5125", "0.9625", "0.5", "0.975"] in rows
    assert ["margin,", "nats", *["-0.25"] * 4] in rows
    assert main(["inspect", str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["preferences"]
    assert list(found) == ["accuracy", "margin"]
    assert found["accuracy"]["max"] == 0.975
