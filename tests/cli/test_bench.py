"""`moefold bench` reports times of small and reduced shapes and refuses invalid arguments."""

import json

import pytest

from moefold.cli.main import main

BELOW_A_FILE = f"{__file__}/x"
"""Path that not even root can create."""


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--steps", "0"], "--steps 0 must be at least 1"),
        (["--shape", "large"], "--shape large is unknown; the shapes are small, mixtral-8x7b-layer"),
        (["--shape", "a layer"], "--shape 'a layer' is unknown"),
        (["--tokens", "300"], "--tokens 300 must be a multiple of 256"),
        (["--experts", "1"], "--experts 1 must be at least 2"),
        (["--tokens", "-5"], "--tokens -5 must be at least 1; leave it out for 2048"),
        (["--experts", "-1"], "--experts -1 must be at least"),
        (["--json", f"{BELOW_A_FILE}.json"], f"--json {BELOW_A_FILE}.json cannot be written: Not a directory"),
        (
            ["dispatch", "--ranks", "4"],
            "moefold bench takes options only, and 'dispatch' is none; benchmarks of",
        ),
    ],
)
def test_invalid_arguments_are_refused(capsys, words, message):
    assert main(["bench", *words]) == 2
    assert capsys.readouterr().err.startswith(f"moefold: error: {message}")


@pytest.mark.e2e
def test_a_bench_of_the_small_shape_reports_its_times(capfd, tmp_path):
    words = ["--tokens", "256", "--steps", "1", "--threads", "1", "--clock", "cpu", "--routing", "balanced"]
    report = tmp_path / "report.json"
    assert main(["bench", *words, "--json", str(report)]) == 0
    out = capfd.readouterr().out
    assert "GEMM " in out
    assert "ratio to" not in out
    found = json.loads(report.read_text())
    assert [row["name"] for row in found["rows"]] == ["moefold"]
    assert all(row["peak_gib"] > 0 and row["tokens_per_s"] > 0 for row in found["rows"])
    assert found["load"] < 1.3
    assert found["kernels_s"]["copy"] > 0
    assert main(["bench", *words, "--json", str(report)]) == 2
    assert "add --force to replace it" in capfd.readouterr().err


@pytest.mark.e2e
def test_a_large_shape_is_measured_with_fewer_experts(capfd):
    words = ["--shape", "qwen3-30b-a3b-layer", "--tokens", "16", "--experts", "8", "--steps", "1", "--threads", "1"]
    assert main(["bench", *words, "--dtype", "float32", "--json", "-"]) == 0
    found = json.loads(capfd.readouterr().out)
    assert (found["shape"], found["num_experts"], found["tokens"]) == ("qwen3-30b-a3b-layer", 8, 16)
    assert [row["name"] for row in found["rows"]] == ["moefold"]
