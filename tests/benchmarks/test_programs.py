"""Programs of benchmarks: their options, their reports and the pictures."""

import importlib
import json

import pytest
import torch

from benchmarks import attention_masks, dispatch_phases, least_loaded, plot_report, rank_times, scaling
from tests.e2e.command import environment
from tests.e2e.forked import run_program

BELOW_A_FILE = f"{__file__}/x"
"""Path that not even root can create."""
PROGRAMS = {module.__name__.split(".")[1]: module for module in (dispatch_phases, rank_times, scaling)}


@pytest.mark.parametrize(
    ("name", "words", "message"),
    [
        ("dispatch_phases", ["--ranks", "0"], "--ranks 0 must be at least 1"),
        ("dispatch_phases", ["--hidden", "100"], "--hidden 100 must be a multiple of 64"),
        *((name, ["--json", f"{BELOW_A_FILE}.json"], f"--json {BELOW_A_FILE}.json cannot be") for name in PROGRAMS),
        *((name, ["--picture", "x.xyz"], "--picture x.xyz must end in .png, .svg or .pdf") for name in PROGRAMS),
        ("rank_times", ["run.device=cuda"], "this benchmark counts CPU time, and run.device='cuda'; set run"),
        ("plot_report", ["nowhere.json", "x.png"], "nowhere.json: No such file"),
        ("plot_report", ["pyproject.toml", "x.png"], "pyproject.toml is no JSON"),
        ("least_loaded", ["--tokens", "0"], "--tokens 0 must be at least 1"),
        ("least_loaded", ["--steps", "0"], "--steps 0 must be at least 1"),
        ("least_loaded", ["--skew", "0.5", "1.5"], "--skew 1.5 must lie in [0, 1]: it is a fraction of the tokens"),
        ("race.step", ["--steps", "0"], "--steps 0 must be at least 1"),
        ("race.step", ["--picture", f"{BELOW_A_FILE}.png"], f"--picture {BELOW_A_FILE}.png cannot be written"),
    ],
)
def test_invalid_options_are_refused(capsys, name, words, message):
    assert importlib.import_module(f"benchmarks.{name}").main(words) == 2
    assert capsys.readouterr().err.startswith(f"error: {message}")


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.parametrize("as_json", [True, False])
def test_the_least_loaded_program_reports_both_dispatchers(capfd, as_json):
    """Its measurements: test_least_loaded.py."""
    words = ["--ranks", "2", "--tokens", "128", "--skew", "0.9", "--steps", "1"]
    assert least_loaded.main([*words, *(["--json"] if as_json else [])]) == 0
    out = capfd.readouterr().out
    if as_json:
        report = json.loads(out)
        assert (report["ranks"], report["tokens_per_rank"]) == (2, 128)
        plain, ours = report["measurements"]
        assert (plain["dispatcher"], ours["dispatcher"]) == ("alltoall", "leastloaded")
        assert plain["rows"] > 1.8 * 128
        assert ours["rows"] <= 1.1 * 128 + 1
    else:
        assert "hot expert  dispatcher" in out
        assert out.count("90%") == 3


def test_attention_is_timed_with_every_mask():
    for run in attention_masks.masks(256, torch.float32, "cpu").values():
        run()


@pytest.mark.e2e
def test_dispatch_on_two_ranks(capfd, tmp_path):
    report, picture = tmp_path / "report.json", tmp_path / "bars.png"
    words = ["--ranks", "2", "--tokens", "64", "--hidden", "64", "--steps", "1", "--json", str(report)]
    assert dispatch_phases.main(words) == 0
    assert "CP x EP, folded and coupled" in capfd.readouterr().out
    bars = json.loads(report.read_text())["bars"]
    assert {bar["name"] for bar in bars} == {"ETP1 EP2", "ETP2 EP1", "CP2 EP2 folded"}
    assert {bar["grain"] for bar in bars} == {"coarse", "fine"}
    assert all(seconds > 0 for bar in bars for seconds in bar["parts_s"].values())
    assert plot_report.main([str(report), str(picture)]) == 0
    assert plot_report.main([str(report), str(picture)]) == 2
    assert "add --force to replace it" in capfd.readouterr().err
    assert plot_report.main([str(report), str(picture), "--force"]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.e2e
def test_ranks_of_a_small_recipe(tmp_path):
    report, picture = tmp_path / "report.json", tmp_path / "bars.png"
    words = ["parallel.world_size=2", "parallel.tp=2", "parallel.ep=2", "parallel.cp=1", "parallel.pp=1"]
    sizes = ["train.seq_len=32", "train.micro_batch_size=2", "train.global_batch_size=2"]
    files = ["--json", str(report), "--picture", str(picture)]
    # Ranks are forked, and this process runs threads of the benchmarks before.
    program = "import sys; from benchmarks.rank_times import main; sys.exit(main(sys.argv[1:]))"
    done = run_program(program, *words, *sizes, "--steps", "1", *files, timeout_s=240.0, environment=environment())
    assert done.returncode == 0, done.stderr
    assert "communication and Python: " in done.stdout
    found = json.loads(report.read_text())
    assert len(found["per_rank"]) == 2
    for rank in found["per_rank"]:
        # Python: the time of an untimed step minus the timed operations; 0 where timing costs more than the step.
        assert rank.pop("Python") >= 0
        assert all(seconds > 0 for seconds in rank.values())
    assert sum(found["shares"].values()) == pytest.approx(1)
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.e2e
def test_the_scaling_program_reports_tokens_and_experts(capfd, tmp_path):
    report, picture = tmp_path / "report.json", tmp_path / "bars.png"
    words = ["--tokens", "64", "128", "--experts", "8", "16", "--steps", "1", "--threads", "1", "--clock", "cpu"]
    assert scaling.main([*words, "--json", str(report), "--picture", str(picture)]) == 0
    assert "of the best" in capfd.readouterr().out
    found = json.loads(report.read_text())
    assert [point["tokens"] for point in found["by_tokens"]] == [64, 128]
    assert [point["experts"] for point in found["by_experts"]] == [8, 16]
    assert found["by_experts"][0]["ratio"] == 1
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.e2e
@pytest.mark.slow
def test_the_race_of_the_small_shape(capfd, tmp_path):
    pytest.importorskip("transformers")
    report, picture = tmp_path / "report.json", tmp_path / "bars.png"
    words = ["--tokens", "256", "--steps", "1", "--threads", "1", "--clock", "cpu", "--routing", "balanced"]
    program = importlib.import_module("benchmarks.race.step")
    assert program.main([*words, "--json", str(report), "--picture", str(picture)]) == 0
    out = capfd.readouterr().out
    assert "part of our step, by itself" in out
    assert "ratio to transformers: " in out
    found = json.loads(report.read_text())
    assert found["kind"] == "comparison"
    names = [piece["name"] for piece in found["pieces"]]
    assert names == [
        *("attention", "norms", "router", "permutation", "expert GEMMs", "combine", "loss", "embedding", "optimizer"),
    ]
    assert sum(piece["seconds"] for piece in found["pieces"]) < 3 * found["rows"][0]["median_s"]
    assert picture.read_bytes().startswith(b"\x89PNG")
