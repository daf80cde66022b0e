"""Ctrl-C and kills of commands that start workers: one line, no process and no folder that stays."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from moefold.cli.main import main
from moefold.launch.local_job import LOCK_FILE
from moefold.launch.rank_pool import WorkerPool
from tests.e2e.command import ROOT, TWO, environment, losses, processes_of, small, wait_until_gone
from tests.e2e.forked import interrupt_forked
from tests.slow import slow

pytestmark = [pytest.mark.e2e, pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks into /proc")]

RECIPE = str(ROOT / "recipes" / "quickstart.toml")
FOUR_RANKS = ("parallel.world_size=4", "parallel.pp=1")
MANY_STEPS = "1000000"
PROGRESS = ("verify: ", "memory: ", "probe: ", "tokenize: ", "tokenise: ", "tokenising")


def are_up(count: int) -> Callable[[int], bool]:
    """Return whether a command in its own session runs this number of processes."""
    return lambda process: len(processes_of(process)) >= count


def _send(number: signal.Signals) -> Callable[[int], None]:
    """Return a function that sends a signal to the session of a process."""
    return lambda process: os.killpg(process, number)


@pytest.mark.parametrize(
    ("words", "processes"),
    [
        # The command, a helper of multiprocessing, the fork server; then the ranks too.
        (("verify", RECIPE, "--shrink", "--steps", "1", *FOUR_RANKS), 3),
        (("verify", RECIPE, "--shrink", "--steps", "1", *FOUR_RANKS), 5),
        # As verify has it: the same pool of ranks.
        *slow([(("memory", RECIPE, *FOUR_RANKS), 5)]),
        (("probe", "{out}.toml", "--ranks", "2", "--device", "cpu", "--rounds", MANY_STEPS), 3),
        (("tokenize", "{text}", "--out", "{out}", "--tokenizer", "bytes", "--processes", "2", "--shard-mb", "4"), 3),
    ],
)
def test_ctrl_c_is_one_line(tmp_path, words, processes):
    text = tmp_path / "texts"
    if "{text}" in words:
        text.mkdir()
        for number in range(40):
            (text / f"{number}.txt").write_text("All work and no play makes Jack a dull boy.\n" * 25_000)
    words = [word.format(text=text, out=tmp_path / "out") for word in words]
    done, session = interrupt_forked(words, are_up(processes), _send(signal.SIGINT), ROOT, environment())
    said = [line for line in done.stderr.splitlines() if not line.startswith(PROGRESS)]
    assert (done.returncode, said) == (130, ["moefold: interrupted"])
    wait_until_gone(session)


@pytest.fixture
def folder():
    """A temporary folder with a short path: sockets lie in it."""
    with tempfile.TemporaryDirectory(prefix="moefold-test-") as path:
        yield Path(path)


def test_a_run_that_is_killed_leaves_nothing_in_the_temporary_folder(tmp_path, folder):
    run_dir = tmp_path / "run"
    words = small(run_dir, f"run.steps={MANY_STEPS}", *TWO)
    variables = environment() | {"TMPDIR": str(folder)}

    def trains(_: int) -> bool:
        return (run_dir / "metrics.jsonl").exists() and len(losses(run_dir)) >= 2

    done, session = interrupt_forked(words, trains, _send(signal.SIGKILL), ROOT, variables)
    assert done.returncode == -signal.SIGKILL
    wait_until_gone(session)
    assert [path.name for path in folder.iterdir() if path.name.startswith(("moefold", "torchelastic", "pymp"))] == []


def test_ranks_end_with_their_caller_and_the_next_cleans_up(folder, monkeypatch):
    """Whatever they are at: these would sleep for an hour."""
    module = "moefold.launch.rank_pool"
    code = f"import time; from {module} import WorkerPool; WorkerPool(['{module}']).run(2, time.sleep, 3600)"
    variables = environment() | {"TMPDIR": str(folder)}
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, env=variables, cwd=ROOT, start_new_session=True) as process:
        while not are_up(5)(process.pid):
            assert process.poll() is None
            time.sleep(0.02)
        # Only to the launcher: its ranks get no signal.
        process.kill()
    wait_until_gone(process.pid)
    (left,) = (path for path in folder.iterdir() if (path / LOCK_FILE).exists())
    (folder / "of another program").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    WorkerPool()
    assert not left.exists()
    assert (folder / "of another program").exists()


def test_a_temporary_folder_with_a_long_path_is_refused(tmp_path, monkeypatch, capsys):
    folder = tmp_path / ("long" * 20)
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    assert main(["verify", RECIPE, "--shrink", "--steps", "1", *FOUR_RANKS]) == 2
    assert "set TMPDIR to a shorter one" in capsys.readouterr().err
