"""One job at a time writes into a run's folder."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from moefold.errors import ConfigError
from moefold.train.run_folder import LOCK_FILE, RunLock

HOLD = """
import sys, time
from pathlib import Path
from moefold.train.run_folder import RunLock
with RunLock(Path(sys.argv[1]), "run.dir", 0):
    print("held", flush=True)
    time.sleep(float(sys.argv[2]))
"""


def holder(folder: Path, hold_s: float) -> "subprocess.Popen[str]":
    """Another process that holds the lock."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder), str(hold_s)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def test_another_job_is_named_and_refused(tmp_path):
    process = holder(tmp_path / "run", 60)
    try:
        with pytest.raises(ConfigError) as caught, RunLock(tmp_path / "run", "run.dir", 0.3):
            pass
    finally:
        process.kill()
    assert f"run.dir={str(tmp_path / 'run')!r} is in use by another job (process {process.pid} on " in str(caught.value)
    assert "wait for it or end it, or set another run.dir (if its host is lost for good, remove " in str(caught.value)


def test_a_lock_that_a_disk_keeps_for_a_lost_host_is_got_rid_of_with_its_file(tmp_path):
    process = holder(tmp_path, 60)
    try:
        (tmp_path / LOCK_FILE).unlink()
        with RunLock(tmp_path, "run.dir", 0):
            pass
    finally:
        process.kill()


def _refused(folder: Path, *, has_written: bool) -> None:
    with RunLock(folder, "run.dir", 0), RunLock(folder / "checkpoints", "checkpoint.dir", 0):
        if has_written:
            (folder / "config.json").touch()
        raise ConfigError("no such checkpoint")


@pytest.mark.parametrize("has_written", [True, False])
def test_a_job_that_is_refused_before_it_writes_leaves_no_folder(tmp_path, has_written):
    with pytest.raises(ConfigError, match="no such checkpoint"):
        _refused(tmp_path / "new" / "run", has_written=has_written)
    left = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*"))
    assert left == (["new", "new/run", f"new/run/{LOCK_FILE}", "new/run/config.json"] if has_written else [])


@pytest.mark.parametrize("ends", ["by itself", "killed"])
def test_the_folder_is_free_once_its_job_has_ended(tmp_path, ends):
    process = holder(tmp_path, 1 if ends == "by itself" else 60)
    if ends != "by itself":
        os.kill(process.pid, signal.SIGKILL)
    started_s = time.monotonic()
    with RunLock(tmp_path, "run.dir", 20):
        assert time.monotonic() - started_s < 15
        assert f'"process": {os.getpid()}' in (tmp_path / LOCK_FILE).read_text()


def test_a_child_of_the_first_job_does_not_keep_the_lock(tmp_path):
    code = HOLD.replace("import sys, time", "import os, sys, time").replace(
        "time.sleep(float(sys.argv[2]))", "os.fork() and os._exit(0); time.sleep(20)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, start_new_session=True
    )
    try:
        assert process.wait(20) == 0
        with RunLock(tmp_path, "run.dir", 0):
            pass
    finally:
        os.killpg(process.pid, signal.SIGKILL)


def test_the_same_process_may_take_it_again(tmp_path):
    for _ in range(2):
        with RunLock(tmp_path, "run.dir", 0):
            pass


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").touch()
    with (
        pytest.raises(ConfigError, match="checkpoint.dir=.*cannot be written: Not a directory"),
        RunLock(tmp_path / "file" / "run", "checkpoint.dir", 0),
    ):
        pass


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full, a disk that is always full")
def test_a_full_disk_is_named(tmp_path):
    (tmp_path / LOCK_FILE).symlink_to("/dev/full")
    with (
        pytest.raises(ConfigError, match=r"run\.dir=.*cannot be written: No space left on device; "),
        RunLock(tmp_path, "run.dir", 0),
    ):
        pass
