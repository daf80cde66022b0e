"""The stages of the half hour on a GPU: limits, resumption, exit status and messages."""

import json
import os
import subprocess
import sys

import pytest

from benchmarks import gpu_half_hour
from benchmarks.gpu_half_hour import DONE, FAILED, REMAINING, UNUSABLE, Results, Stage, run_stage, run_stages
from tests.architecture.rules import ROOT

MACHINE = {"device": "an abacus", "torch": "2.11.0", "python": "3.12.3"}


def _stage(name, code, limit_s=60.0, **more):
    return Stage(name, [sys.executable, "-c", code], limit_s, **more)


def _results(folder):
    results = Results(folder / "results.json", MACHINE)
    results.load()
    return results


def test_a_stage_that_fails_does_not_stop_the_others(tmp_path):
    stages = [_stage("first", "print('no'); raise SystemExit(3)"), _stage("second", "pass")]
    assert run_stages(stages, _results(tmp_path), 600) == FAILED
    stored = json.loads((tmp_path / "results.json").read_text())
    assert stored["machine"] == MACHINE
    assert {name: entry["status"] for name, entry in stored["stages"].items()} == {
        "first": "failed",
        "second": "passed",
    }
    assert stored["stages"]["first"]["tail"] == ["no"]
    assert (tmp_path / "first.log").read_text() == "no\n"


def test_the_next_call_goes_on_where_the_budget_ended(tmp_path, capsys):
    trace = tmp_path / "trace"
    code = f"open({str(trace)!r}, 'a').write('x')"
    stages = [_stage(name, code, 60.0) for name in ("a", "b", "c")]
    times = iter([0.0, 1.0, 50.0])
    assert run_stages(stages, _results(tmp_path), 100, lambda: next(times)) == REMAINING
    assert "b: needs up to 60 s and 50 s are left; call again" in capsys.readouterr().out
    assert trace.read_text() == "x"
    assert run_stages(stages, _results(tmp_path), 600) == DONE
    assert trace.read_text() == "xxx"
    assert run_stages(stages, _results(tmp_path), 0) == DONE


def test_a_stage_at_its_limit_is_killed_with_its_children_and_its_rows_stay(tmp_path):
    rows = tmp_path / "rows.jsonl"
    seconds = f"6{os.getpid()}"
    script = f"echo '[1]' > {rows}; echo '[2]' >> {rows}; sleep {seconds} & wait"
    entry = run_stage(Stage("slow", ["sh", "-c", script], 3.0, json_file=rows), tmp_path)
    assert entry["status"] == "timed out"
    assert entry["rows"] == [[1], [2]]
    running = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout.splitlines()
    assert f"sleep {seconds}" not in running


def test_a_missing_tool_is_no_failure(tmp_path):
    assert run_stages([_stage("x", "1/0", tool="no-such-program")], _results(tmp_path), 600) == DONE
    assert _results(tmp_path).stages["x"]["status"] == "left out"


def test_results_of_another_machine_are_not_continued(tmp_path):
    run_stages([_stage("x", "pass")], _results(tmp_path), 600)
    with pytest.raises(gpu_half_hour.UnusableError, match="an abacus.*set --out"):
        Results(tmp_path / "results.json", MACHINE | {"device": "H100"}).load()


@pytest.mark.parametrize("suite", ["proof", "bench", "sweep"])
@pytest.mark.parametrize("is_tiny", [True, False])
def test_every_stage_fits_into_a_call(tmp_path, suite, is_tiny):
    for device in ("cuda", "cpu"):
        stages = gpu_half_hour.suite_stages(suite, device, tmp_path, is_tiny=is_tiny)
        assert max(stage.limit_s for stage in stages) <= 570
        assert len({stage.name for stage in stages}) == len(stages)
        files = [word for stage in stages for word in stage.command if word.startswith("tests/")]
        assert [name for name in files if not (ROOT / name).exists()] == []


def test_the_bench_fits_into_one_call(tmp_path):
    stages = gpu_half_hour.suite_stages("bench", "cuda", tmp_path, is_tiny=False)
    assert sum(stage.limit_s for stage in stages) <= 570


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--stages", "env,x"], "--stages has no x; the stages are env, rates"),
        (["--budget", "100"], "--budget 100 must be at least 360"),
        (["--device", "cuda"], "finds no CUDA device; rehearse without one"),
    ],
)
def test_what_cannot_run_is_said_in_one_line(tmp_path, capsys, monkeypatch, words, message):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert gpu_half_hour.main(["--device", "cpu", "--out", str(tmp_path), *words]) == UNUSABLE
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


def test_a_relative_folder_is_that_of_the_caller(tmp_path, monkeypatch):
    """The stages run in the root of the repository."""
    monkeypatch.chdir(tmp_path)
    seen = []
    monkeypatch.setattr(gpu_half_hour, "run_stages", lambda stages, results, budget_s: seen.extend(stages) or DONE)
    assert gpu_half_hour.main(["bench", "--device", "cpu", "--tiny", "--out", "here"]) == DONE
    (stage,) = seen
    assert stage.json_file.parent == tmp_path / "here"
    assert str(stage.json_file) in stage.command


def test_missing_packages_are_named(capsys, monkeypatch):
    monkeypatch.setattr(gpu_half_hour, "PACKAGES", {"torch": "torch", "no_such_module": "no-such-package"})
    assert gpu_half_hour.main(["--device", "cpu"]) == UNUSABLE
    assert "-m pip install no-such-package\n" in capsys.readouterr().err


def _make(*words: str) -> subprocess.CompletedProcess[str]:
    # A make that runs this test would have this one print the folder that it enters.
    env = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL")}
    return subprocess.run(["make", *words], cwd=ROOT, env=env, capture_output=True, text=True)


def test_make_needs_no_environment():
    done = _make("-n", "READY=", "PY=python3", "ARGS=--device cpu", "gpu", "bench-gpu", "bench-gpu-sweep")
    assert done.returncode == 0
    call = "python3 benchmarks/gpu_half_hour.py"
    commands = [line for line in done.stdout.splitlines() if line.startswith(call)]
    assert commands == [f"{call} {suite} --device cpu" for suite in ("proof", "bench", "sweep")]


@pytest.mark.parametrize("target", ["gpu", "bench-gpu", "bench-gpu-sweep"])
def test_make_says_what_to_do_without_a_python(target):
    done = _make("READY=", "PY=no-such-python", target)
    assert done.returncode == 2
    assert done.stderr.splitlines()[0] == (
        f"no Python at PY=no-such-python; name one that has torch: make {target} READY= PY=python3; "
        "or build .venv: make setup"
    )
