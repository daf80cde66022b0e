"""One job at a time writes into a run's folder."""

import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from moefold.errors import ConfigError
from moefold.host.folder_lock import LOCK_FILE, FolderLock, is_in_use

HOLD = """
import sys, time
from pathlib import Path
from moefold.host.folder_lock import FolderLock
with FolderLock(Path(sys.argv[1]), "run.dir", 0):
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
        with pytest.raises(ConfigError) as caught, FolderLock(tmp_path / "run", "run.dir", 0.3):
            pass
    finally:
        process.kill()
    assert f"run.dir={str(tmp_path / 'run')!r} is in use by another job (process {process.pid} on " in str(caught.value)
    assert "wait for it or end it, or set another run.dir (if its host is lost for good, remove " in str(caught.value)


def test_a_lock_that_a_disk_keeps_for_a_lost_host_is_got_rid_of_with_its_file(tmp_path):
    process = holder(tmp_path, 60)
    try:
        (tmp_path / LOCK_FILE).unlink()
        with FolderLock(tmp_path, "run.dir", 0):
            pass
    finally:
        process.kill()


def _refused(folder: Path, *, has_written: bool) -> None:
    with FolderLock(folder, "run.dir", 0), FolderLock(folder / "checkpoints", "checkpoint.dir", 0):
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
    with FolderLock(tmp_path, "run.dir", 20):
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
        with FolderLock(tmp_path, "run.dir", 0):
            pass
    finally:
        os.killpg(process.pid, signal.SIGKILL)


def test_the_same_process_may_take_it_again(tmp_path):
    for _ in range(2):
        with FolderLock(tmp_path, "run.dir", 0):
            pass


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").touch()
    with (
        pytest.raises(ConfigError, match="checkpoint.dir=.*cannot be written: Not a directory"),
        FolderLock(tmp_path / "file" / "run", "checkpoint.dir", 0),
    ):
        pass


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full, a disk that is always full")
def test_a_full_disk_is_named(tmp_path):
    (tmp_path / LOCK_FILE).symlink_to("/dev/full")
    with (
        pytest.raises(ConfigError, match=r"run\.dir=.*cannot be written: No space left on device; "),
        FolderLock(tmp_path, "run.dir", 0),
    ):
        pass


def _free_for_another_process(folder: Path) -> bool:
    """Return the result of a process that opens the lock file by itself: to it, this process is another one."""
    try:
        with FolderLock(folder, "run.dir", 0):
            return True
    except ConfigError:
        return False


def test_a_lock_outlives_every_other_descriptor_of_its_file(tmp_path):
    with FolderLock(tmp_path, "run.dir", 0):
        for flags in (os.O_RDONLY, os.O_RDWR):
            os.close(os.open(tmp_path / LOCK_FILE, flags))
        assert is_in_use(tmp_path)
        assert not _free_for_another_process(tmp_path)
        assert is_in_use(tmp_path), "a refused job and a question leave the lock"
    assert not is_in_use(tmp_path)
    assert (tmp_path / LOCK_FILE).read_text() == "", "no owner is named any more"


def test_a_question_in_between_does_not_turn_a_job_away(tmp_path):
    (tmp_path / LOCK_FILE).touch()
    asked = threading.Event()

    def ask() -> None:
        while not asked.is_set():
            is_in_use(tmp_path)

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        for _ in range(50):
            with FolderLock(tmp_path, "run.dir", 5):
                assert is_in_use(tmp_path)
    finally:
        asked.set()
        thread.join()


def test_a_pipe_in_place_of_the_lock_file_blocks_nobody(tmp_path):
    os.mkfifo(tmp_path / LOCK_FILE)
    assert not is_in_use(tmp_path)


def _without_locks(descriptor: int, operation: int) -> None:
    raise OSError(errno.ENOLCK, "No locks available")


@pytest.mark.parametrize("owner", ["runs here", "has ended", "elsewhere", "no owner"])
def test_without_locks_the_process_that_the_file_names_counts(tmp_path, monkeypatch, owner, caplog):
    process = holder(tmp_path, 60)
    text = (tmp_path / LOCK_FILE).read_text()
    if owner == "has ended":
        process.kill()
        process.wait()
    if owner == "elsewhere":
        (tmp_path / LOCK_FILE).write_text(json.dumps(json.loads(text) | {"machine": "another"}))
    if owner == "no owner":
        (tmp_path / LOCK_FILE).write_text('[{"host": 1}]')
    monkeypatch.setattr("fcntl.flock", _without_locks)
    try:
        assert _free_for_another_process(tmp_path) == (owner != "runs here")
    finally:
        process.kill()
        process.wait()
    assert ("make sure that no other job writes there" in caplog.text) == (owner != "runs here")
