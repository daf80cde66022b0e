"""Temporary folders: the next start removes the folders of a process that was killed, and no others."""

import os
import time
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from moefold.launch.local_job import LOCK_FILE, claim_folder, record_files, remove_stale_folders
from tests.e2e.forked import PRELOAD


def _claim(folder: Path, sender: Connection) -> None:
    claim_folder(folder)
    sender.send("claimed")
    time.sleep(600)


def _claimed(folder: Path) -> BaseProcess:
    """Claim a folder in another process, which lives on."""
    folder.mkdir()
    (folder / "content").write_text("x")
    context = get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_claim, args=(folder, sender), daemon=True)
    process.start()
    assert receiver.recv() == "claimed"
    return process


def test_folders_of_the_dead_go_and_folders_of_the_living_and_of_others_stay(tmp_path):
    living, dead = _claimed(tmp_path / "living"), _claimed(tmp_path / "dead")
    try:
        dead.kill()
        dead.join()
        (tmp_path / "of another program").mkdir()
        (tmp_path / "file").touch()
        target = tmp_path / "target"
        target.mkdir()
        (target / LOCK_FILE).touch()
        looked_at = tmp_path / "looked at"
        looked_at.mkdir()
        (looked_at / "link").symlink_to(target)
        remove_stale_folders(looked_at)
        assert target.exists()
        (target / LOCK_FILE).unlink()
        remove_stale_folders(tmp_path)
        left = {path.name for path in tmp_path.iterdir()}
        assert left == {"living", "of another program", "file", "target", "looked at"}
        assert (tmp_path / "living" / "content").read_text() == "x"
    finally:
        living.kill()
        living.join()


def test_a_folder_claimed_twice_has_one_lock_file(tmp_path):
    claim_folder(tmp_path)
    claim_folder(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [LOCK_FILE]
    remove_stale_folders(tmp_path.parent)
    assert tmp_path.exists()


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs files without names")
def test_records_have_no_names_on_the_disk(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with record_files(2) as files:
        assert len(files) == 3
        Path(files[1]).write_text("what rank 1 does")
        assert Path(files[1]).read_text() == "what rank 1 does"
        assert list(tmp_path.iterdir()) == []


def test_where_files_need_names_the_folder_is_claimed_and_removed(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.delattr("os.memfd_create")
    with record_files(2) as files:
        assert all(Path(file).read_bytes() == b"" for file in files)
        (folder,) = tmp_path.iterdir()
        assert (folder / LOCK_FILE).exists()
    assert list(tmp_path.iterdir()) == []
