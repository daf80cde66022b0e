"""`moefold probe` writes a device that plan and simulate read; `simulate --run` compares with a run."""

import json
from pathlib import Path

import pytest

from moefold.bench import device_probe
from moefold.cli.main import main
from moefold.config.schema import config_to_dict
from moefold.cost.hardware import load_device
from moefold.metrics.reader import METRICS_FILE
from moefold.recipe import load_config
from tests.bench.small_sizes import SMALLEST_SIZES


@pytest.fixture(autouse=True)
def smallest_sizes(monkeypatch):
    monkeypatch.setitem(device_probe.SIZES, "cpu", SMALLEST_SIZES)


@pytest.mark.e2e
def test_the_file_is_a_device_of_the_planner(tmp_path, capfd):
    path, report = tmp_path / "mine.toml", tmp_path / "mine.json"
    words = ["probe", str(path), "--ranks", "1", "--rounds", "1", "--device", "cpu"]
    assert main([*words, "--json", str(report)]) == 0
    out = capfd.readouterr().out
    assert "GEMM float32 64 x 16 x 64" in out
    assert f"use it as --gpu {path}" in out
    assert load_device(str(path)).name == "mine"
    stored = json.loads(report.read_text())
    assert stored["fitted"]["name"] == "mine"
    assert all(one["name"] in out and one["measured_s"] > 0 for one in stored["predictions"])
    assert main(["simulate", "recipes/quickstart.toml", "--gpu", str(path)]) == 0
    assert main(words) == 2
    assert "exists" in capfd.readouterr().err
    assert main([*words, "--force"]) == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["x.txt"], "FILE x.txt must end in .toml"),
        (["x.toml", "--ranks", "0"], "--ranks 0 must be at least 1"),
        (["x.toml", "--rounds", "-1"], "--rounds -1 must be at least 1"),
        (["x.toml", "--base", "h999"], "--base h999 is unknown"),
        ([f"{__file__}/x.toml"], f"FILE {__file__}/x.toml cannot be written: Not a directory"),
    ],
)
def test_wrong_words_are_refused(tmp_path, monkeypatch, capsys, words, message):
    monkeypatch.chdir(tmp_path)
    assert main(["probe", *words]) == 2
    assert capsys.readouterr().err.startswith(f"moefold: error: {message}")


def _run_folder(path, step_times):
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config_to_dict(load_config(Path("recipes/quickstart.toml"), []))))
    lines = [json.dumps({"step": i, "step_time_s": seconds}) for i, seconds in enumerate(step_times, 1)]
    (path / METRICS_FILE).write_text("\n".join(lines) + "\n")
    return str(path)


def test_a_simulated_step_is_compared_with_the_median_step_of_a_run(tmp_path, capsys):
    run_dir = _run_folder(tmp_path / "run", [9.0] * 5 + [2.0, 4.0, 3.0])
    assert main(["simulate", "--run", run_dir, "--gpu", "cpu", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["measured"] == {"step_time_s": 3.0, "steps": 3}
    assert main(["simulate", "--run", run_dir, "--gpu", "cpu"]) == 0
    ratio = report["step_time_s"] / 3.0
    assert f"measured: 3 s, the median of 3 steps of {run_dir}; simulated / measured {ratio:.2f}" in (
        capsys.readouterr().out
    )


def test_simulate_refuses_a_folder_that_is_not_a_run(tmp_path, capsys):
    short = _run_folder(tmp_path / "short", [1.0] * 5)
    for words, message in (
        ([], "name a RECIPE.toml, or --run RUN_DIR"),
        (["recipes/quickstart.toml", "--run", short], "name a RECIPE.toml, or --run RUN_DIR"),
        (["--run", str(tmp_path)], f"--run {tmp_path} holds no run"),
        (["--run", short], f"--run {short} has no more than 5 steps"),
    ):
        assert main(["simulate", *words]) == 2
        assert message in capsys.readouterr().err
