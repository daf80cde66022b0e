"""The stages of the half hour on a GPU: limits, resumption, exit status and messages."""

import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from dataclasses import replace

import pytest
import torch

from benchmarks import gpu_half_hour, gpu_suites
from benchmarks.gpu_half_hour import DONE, FAILED, REMAINING, UNUSABLE, run_stages
from benchmarks.gpu_results import CUT_SHORT, LEFT_OUT, Results, UnusableError
from benchmarks.gpu_suites import GPU_TESTS, Stage, suite_stages
from tests.architecture.rules import ROOT

MACHINE = {"device": "an abacus", "torch": "2.11.0", "triton": "3.6.0 cp312", "python": "3.12.3", "sizes": "full"}
OTHER = MACHINE | {"device": "another abacus"}


def _stage(name, code, limit_s=60.0, **more):
    return Stage(name, [sys.executable, "-S", "-c", code], limit_s, **more)


def _results(folder, machine=MACHINE, carried=None):
    results = Results(folder / "results.json", machine)
    results.load(carried)
    return results


@pytest.fixture
def work(tmp_path):
    folder = tmp_path / "work"
    folder.mkdir()
    return folder


@pytest.fixture
def out(tmp_path):
    folder = tmp_path / "out"
    folder.mkdir()
    return folder


def _statuses(results):
    return {name: entry["status"] for name, entry in results.stages.items()}


def test_a_stage_that_fails_does_not_stop_the_others(out, work):
    stages = [_stage("first", "print('no'); raise SystemExit(3)"), _stage("second", "pass")]
    assert run_stages(stages, _results(out), work, 600) == FAILED
    (stored,) = json.loads((out / "results.json").read_text())["machines"]
    assert stored["machine"] == MACHINE
    assert {name: entry["status"] for name, entry in stored["stages"].items()} == {
        "first": "failed",
        "second": "passed",
    }
    assert stored["stages"]["first"]["tail"] == ["no"]
    assert sorted(path.name for path in out.iterdir()) == ["logs.tgz", "results.json"]
    with tarfile.open(out / "logs.tgz") as tar:
        assert tar.extractfile("first.log").read() == b"no\n"


def test_a_stage_without_enough_time_is_skipped_and_the_next_one_runs(out, work, capsys):
    stages = [
        _stage("a", "pass"),
        _stage("b", "pass", 60.0, expected_s=50.0),
        _stage("c", "pass", 60.0, expected_s=30.0),
    ]
    times = iter([0.0, 0.0, 60.0, 60.0])
    assert run_stages(stages, _results(out), work, 100, lambda: next(times)) == REMAINING
    printed = capsys.readouterr().out
    assert "b: skipped, it takes about 50 s and 35 s are left" in printed
    assert "remaining: b; call again" in printed
    results = _results(out)
    assert _statuses(results) == {"a": "passed", "c": "passed"}
    assert results.stages["c"]["limit_s"] == 35.0
    assert run_stages(stages, _results(out), work, 600) == DONE
    assert run_stages(stages, _results(out), work, 0) == DONE


def test_a_stage_that_reads_the_files_of_another_waits_for_it(out, work, capsys):
    last = _stage("last", "pass", after="first")
    assert run_stages([_stage("first", "1/0"), last], _results(out), work, 600) == REMAINING
    assert "last: skipped, it reads what first writes" in capsys.readouterr().out
    again = _results(out)
    again.repeated = {"first"}
    assert run_stages([_stage("first", "pass"), last], again, work, 600) == DONE


def test_a_stage_at_its_limit_is_killed_with_its_children_and_its_rows_stay(out, work):
    rows = work / "rows.jsonl"
    seconds = f"6{os.getpid()}"
    script = f"echo '[1]' > {rows}; echo '[2]' >> {rows}; printf '[3' >> {rows}; sleep {seconds} & wait"
    stage = Stage("slow", ["sh", "-c", script], 3.0, json_file=rows)
    results = _results(out)
    assert run_stages([stage], results, work, 600) == FAILED
    assert results.stages["slow"]["status"] == "timed out"
    assert results.stages["slow"]["rows"] == [[1], [2]]
    running = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout.splitlines()
    assert f"sleep {seconds}" not in running


def test_a_stage_that_ends_with_its_call_is_run_again(out, work, capsys):
    rows = work / "rows.jsonl"
    stage = Stage("cut", ["sh", "-c", f"echo '[1]' > {rows}; sleep 60"], 60.0, json_file=rows)
    assert run_stages([stage], _results(out), work, 12.0) == REMAINING
    assert "remaining: cut" in capsys.readouterr().out
    results = _results(out)
    assert (results.stages["cut"]["status"], results.stages["cut"]["rows"]) == (CUT_SHORT, [[1]])
    assert run_stages([replace(stage, command=["true"])], results, work, 600) == DONE


CALL = """
import signal, sys
from pathlib import Path
from benchmarks import gpu_half_hour
from benchmarks.gpu_results import Results
from benchmarks.gpu_suites import Stage
out, work, machine, script = eval(sys.argv[1])
gpu_half_hour.RECORDED_EVERY_S = 0.05
signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(1))
stage = Stage("cut", ["sh", "-c", script], 60.0, json_file=Path(work) / "rows.jsonl")
gpu_half_hour.run_stages([stage], Results(Path(out) / "results.json", machine), Path(work), 600.0)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_lease_that_ends_early_leaves_the_rows_of_the_running_stage(out, work, number):
    """SIGKILL: a machine that vanishes."""
    pid = work / "pid"
    script = f"echo $$ > {pid}; echo '[1]' > {work / 'rows.jsonl'}; exec sleep 60"
    words = repr((str(out), str(work), MACHINE, script))
    call = subprocess.Popen([sys.executable, "-c", CALL, words], cwd=ROOT, stdout=subprocess.DEVNULL)
    try:
        while not (out / "results.json").exists() or not _results(out).stages["cut"]["rows"]:
            assert call.poll() is None
            time.sleep(0.02)
    finally:
        call.send_signal(number)
        call.wait()
        if number == signal.SIGKILL and pid.exists():
            os.killpg(int(pid.read_text()), signal.SIGKILL)
    results = _results(out)
    assert (results.stages["cut"]["status"], results.stages["cut"]["rows"]) == (CUT_SHORT, [[1]])
    assert not results.is_done("cut")
    assert (out / "logs.tgz").exists() == (number == signal.SIGTERM)


def test_a_missing_tool_or_package_is_not_a_failure_and_is_looked_for_again(out, work):
    stages = [
        _stage("tool", "1/0", tool="no-such-program"),
        _stage("wheel", "1/0", packages={"no_such_module": "no-such-wheel"}),
        _stage("wide", "1/0", gpus=1000),
        _stage("last", "pass"),
    ]
    assert run_stages(stages, _results(out), work, 600) == DONE
    results = _results(out)
    assert _statuses(results) == {"tool": LEFT_OUT, "wheel": LEFT_OUT, "wide": LEFT_OUT, "last": "passed"}
    found = torch.cuda.device_count()
    assert results.stages["wide"]["tail"] == [f"it needs 1000 GPUs, and this machine has {found}"]
    assert results.stages["tool"]["tail"] == ["no-such-program is not on the PATH"]
    assert results.stages["wheel"]["tail"][0].endswith("-m pip install no-such-wheel")
    assert run_stages([_stage("tool", "pass", tool="sh")], results, work, 600) == DONE
    assert _results(out).stages["tool"]["status"] == "passed"


def test_another_card_goes_on_with_the_remaining_stages(out, work, tmp_path, capsys):
    stages = [_stage("rates", "pass"), _stage("layer", "pass"), _stage("step", "pass")]
    run_stages(stages[:2], _results(out), work, 600)
    fresh = tmp_path / "fresh"
    fresh.mkdir()
    carried = _results(fresh, OTHER, out / "results.json")
    assert "earlier results are of an abacus with torch 2.11.0" in capsys.readouterr().out
    assert run_stages(stages, carried, work, 600) == DONE
    first, second = json.loads((fresh / "results.json").read_text())["machines"]
    assert (first["machine"], list(first["stages"])) == (MACHINE, ["rates", "layer"])
    # The rates are the yardstick of each card.
    assert (second["machine"], list(second["stages"])) == (OTHER, ["rates", "step"])


def test_a_fresh_machine_of_the_same_kind_goes_on_with_carried_results_and_logs(out, work, tmp_path):
    run_stages([_stage("probe", f"open({str(work / 'device.toml')!r}, 'w').write('x')")], _results(out), work, 600)
    fresh = tmp_path / "fresh"
    fresh.mkdir()
    later = tmp_path / "later"
    later.mkdir()
    results = _results(fresh, carried=out / "results.json")
    results.unpack_logs(later, out / "results.json")
    assert (later / "device.toml").read_text() == "x"
    assert run_stages([_stage("probe", "1/0"), _stage("plan", "pass", after="probe")], results, later, 600) == DONE
    with tarfile.open(fresh / "logs.tgz") as tar:
        assert sorted(tar.getnames()) == ["device.toml", "plan.log", "probe.log"]


def test_a_broken_archive_of_logs_costs_only_the_logs(out, work, capsys):
    (out / "logs.tgz").write_bytes(b"no archive")
    _results(out).unpack_logs(work, None)
    assert "logs.tgz cannot be read, so that its logs are lost" in capsys.readouterr().out


@pytest.mark.parametrize("text", ["", "[]", '{"stages": {}}'])
def test_a_file_without_results_is_refused(out, text):
    (out / "results.json").write_text(text)
    with pytest.raises(UnusableError, match="has no results of this program"):
        _results(out)


def test_options_that_would_mix_or_lose_results_are_refused(out, work, tmp_path):
    run_stages([_stage("x", "pass")], _results(out), work, 600)
    with pytest.raises(UnusableError, match="an abacus.*set --out"):
        _results(out, MACHINE | {"sizes": "tiny"})
    with pytest.raises(UnusableError, match="are not added; set --out"):
        _results(out, carried=out / "results.json")
    with pytest.raises(UnusableError, match="--carried .*absent.json does not exist"):
        _results(tmp_path, carried=tmp_path / "absent.json")


@pytest.mark.parametrize("suite", ["proof", "bench", "sweep"])
@pytest.mark.parametrize("is_tiny", [True, False])
def test_every_stage_fits_into_a_call(tmp_path, suite, is_tiny):
    for device in ("cuda", "cpu"):
        stages = suite_stages(suite, device, tmp_path, is_tiny=is_tiny)
        assert all(stage.expected_s <= stage.limit_s <= 570 for stage in stages)
        assert len({stage.name for stage in stages}) == len(stages)
        files = [word for stage in stages for word in stage.command if word.startswith("tests/")]
        assert [name for name in files if not (ROOT / name).exists()] == []


def _lease(tmp_path, budgets_s, overhead_s):
    """Return the stages that each call of a lease runs, if each takes as long as expected, and its start the rest."""
    stages = suite_stages("proof", "cuda", tmp_path, is_tiny=False)
    done = []
    for budget_s in budgets_s:
        left_s = budget_s - gpu_half_hour.KILLED_AFTER_S
        found = []
        for stage in stages:
            is_new = all(stage.name not in call for call in done)
            if is_new and stage.expected_s <= left_s and (stage.after is None or stage.after in found):
                found.append(stage.name)
                left_s -= stage.expected_s + overhead_s
        done.append(found)
    return done


@pytest.mark.parametrize("overhead_s", [0.0, 2.0, 4.0])
def test_a_lease_of_a_quarter_of_an_hour_reaches_the_most_valuable_stages(tmp_path, overhead_s):
    """A lease of 900 s: a start takes 100 s, and a call has at most 600 s."""
    first, second = _lease(tmp_path, (430, 345), overhead_s)
    assert first[:6] == ["env", "contact", "rates", "layer", "step", "attention"]
    assert {"graphs", "fp8", "staged", "tests", "constants"} <= {*first, *second}
    (whole,) = _lease(tmp_path, [570], overhead_s)
    assert whole[:8] == ["env", "contact", "rates", "layer", "step", "attention", "graphs", "fp8"]
    assert _lease(tmp_path, [200], overhead_s)[0][:3] == ["env", "contact", "rates"]


def test_every_gpu_test_of_one_rank_is_in_the_stage_of_tests():
    marked = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "tests").rglob("*.py")
        if "pytest.mark." + "gpu" in path.read_text() and not path.is_relative_to(ROOT / "tests" / "verify")
    }
    assert {name for name in marked if not name.startswith(GPU_TESTS)} == set()


def test_the_bench_fits_into_one_call(tmp_path):
    stages = suite_stages("bench", "cuda", tmp_path, is_tiny=False)
    assert sum(stage.limit_s for stage in stages) <= 570


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--stages", "env,x"], "--stages has no x; the stages are env, contact"),
        (["--device", "cuda"], "finds no CUDA device; rehearse without one"),
        (["--carried", "absent.json"], "--carried absent.json does not exist"),
    ],
)
def test_a_stage_that_cannot_run_says_so_in_one_line(tmp_path, capsys, monkeypatch, words, message):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert gpu_half_hour.main(["--device", "cpu", "--out", str(tmp_path), *words]) == UNUSABLE
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


@pytest.mark.slow
def test_the_stages_of_tests_need_only_their_packages():
    """A process that sees no other package collects the named tests; `shtab` once ended their collection."""
    code = "import sys; from tests.benchmarks.only_packages import hide_others; hide_others(); import pytest;"
    words = ["-q", "--collect-only", "-m", "gpu", "-p", "no:cacheprovider", *GPU_TESTS, "tests/cli/test_completion.py"]
    command = [sys.executable, "-c", f"{code} sys.exit(pytest.main({words!r}))"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": "src"})
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr


def test_a_relative_folder_is_relative_to_the_caller(tmp_path, monkeypatch):
    """The stages run in the root of the repository."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(gpu_half_hour, "suite_stages", lambda *args, **kwargs: [_stage("x", "print('here')")])
    assert gpu_half_hour.main(["bench", "--device", "cpu", "--tiny", "--out", "here"]) == DONE
    assert _results(tmp_path / "here", _machine(tmp_path / "here")).stages["x"]["tail"] == ["here"]


def _machine(folder):
    return json.loads((folder / "results.json").read_text())["machines"][0]["machine"]


def test_missing_packages_are_named(capsys, monkeypatch, tmp_path):
    needed = {"torch": "torch", "no_such_module": "no-such-package"}
    monkeypatch.setattr(gpu_suites, "LIBRARIES", needed)
    monkeypatch.setattr(gpu_suites, "TEST_LIBRARIES", needed)
    assert gpu_half_hour.main(["--device", "cpu"]) == UNUSABLE
    assert "-m pip install no-such-package\n" in capsys.readouterr().err
    stages = [_stage("x", "pass"), _stage("y", "1/0", packages=needed)]
    monkeypatch.setattr(gpu_half_hour, "suite_stages", lambda *args, **kwargs: stages)
    assert gpu_half_hour.main(["--device", "cpu", "--out", str(tmp_path)]) == DONE
    assert "-m pip install no-such-package; without them are left out: y\n" in capsys.readouterr().out


QUICK = """
import sys
rows, needed, name, written = sys.argv[1:]
open(rows, "w").write('{"name": "done"}\\n')
assert not needed or open(needed).read() == "probe"
open(written, "w").write(name)
"""
"""A stage that reads the file of another one, and writes rows and a file."""


def _quick_stages(suite, device, work, *, is_tiny):
    """Return the stages of a GPU with their order and rules, and a hundred times their seconds."""
    found = []
    for stage in suite_stages(suite, "cuda", work, is_tiny=False):
        rows = work / f"{stage.name}.jsonl"
        words = [str(rows), str(work / f"{stage.after}.txt") if stage.after else "", stage.name]
        command = [sys.executable, "-S", "-c", QUICK, *words, str(work / f"{stage.name}.txt")]
        seconds = {"limit_s": 100 * stage.limit_s, "expected_s": 100 * stage.expected_s}
        found.append(replace(stage, command=command, json_file=rows, **seconds))
    return found


def test_a_rehearsal_skips_goes_on_and_keeps_one_archive(tmp_path, capsys, monkeypatch):
    """The stages of a GPU in two calls on two machines; `test_a_rehearsal_runs_every_stage` runs the real ones."""
    monkeypatch.setattr(gpu_half_hour, "suite_stages", _quick_stages)
    words = ["--device", "cpu", "--tiny", "--out"]
    assert gpu_half_hour.main([*words, str(tmp_path / "a"), "--budget", "6000"]) == REMAINING
    printed = capsys.readouterr().out
    first = ["env", "rates", "attention", "fp8", "constants", "shared"]
    skipped = ["contact", "layer", "step", "graphs", "staged", "tests", "products", "probe", "plan"]
    assert f"remaining: {', '.join(skipped)}; call again" in printed
    assert "contact: skipped, it takes about 7500 s" in printed
    assert "plan: skipped, it reads what probe writes" in printed
    carried = tmp_path / "a" / "results.json"
    (machine,) = json.loads(carried.read_text())["machines"]
    assert [name for name in machine["stages"] if name != "sanitize"] == first
    assert machine["stages"]["env"]["rows"]
    goes_on = [*words, str(tmp_path / "b"), "--carried", str(carried), "--budget", "100000"]
    assert gpu_half_hour.main(goes_on) == DONE
    assert [line.split()[1] for line in capsys.readouterr().out.splitlines() if " after " in line] == [
        f"{name}:" for name in skipped
    ]
    (machine,) = json.loads((tmp_path / "b" / "results.json").read_text())["machines"]
    assert set(machine["stages"]) == set(gpu_suites.LIMITS_S)
    left_out = {name for name, entry in machine["stages"].items() if entry["status"] == LEFT_OUT}
    assert left_out <= {"shared", "sanitize"}
    assert all(entry["status"] == "passed" for name, entry in machine["stages"].items() if name not in left_out)
    with tarfile.open(tmp_path / "b" / "logs.tgz") as tar:
        ran = {*first, *skipped} - left_out
        assert {f"{name}.log" for name in ran} <= set(tar.getnames())
        assert tar.extractfile("fp8.txt").read() == b"fp8"


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_rehearsal_runs_every_stage(tmp_path, capfd):
    assert gpu_half_hour.main(["--device", "cpu", "--tiny", "--budget", "3000", "--out", str(tmp_path)]) == DONE
    stages = json.loads((tmp_path / "results.json").read_text())["machines"][0]["stages"]
    assert list(stages) == list(gpu_suites.LIMITS_S)
    wrong = {name: entry for name, entry in stages.items() if entry["status"] not in ("passed", LEFT_OUT)}
    assert not wrong
    with tarfile.open(tmp_path / "logs.tgz") as tar:
        assert {"contact.jsonl", "device.toml", "tests.log"} <= set(tar.getnames())


def _make(*words: str) -> subprocess.CompletedProcess[str]:
    # A make that runs this test would have this one print the folder that it enters.
    env = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL")}
    return subprocess.run(["make", *words], cwd=ROOT, env=env, capture_output=True, text=True)


def test_make_needs_no_environment():
    done = _make("-n", "READY=", "PY=python3", "ARGS=--device cpu", "gpu", "bench-gpu", "bench-gpu-sweep")
    assert done.returncode == 0
    call = "python3 -m benchmarks.gpu_half_hour"
    commands = [line for line in done.stdout.splitlines() if line.startswith(call)]
    assert commands == [f"{call} {suite} --device cpu" for suite in ("proof", "bench", "sweep")]


@pytest.mark.parametrize("target", ["gpu", "bench-gpu", "bench-gpu-sweep"])
def test_make_names_the_way_out_without_a_python(target):
    done = _make("READY=", "PY=no-such-python", target)
    assert done.returncode == 2
    assert done.stderr.splitlines()[0] == (
        f"no Python at PY=no-such-python; name one that has torch: make {target} READY= PY=python3; "
        "or build .venv: make setup"
    )
