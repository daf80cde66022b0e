"""Folders of checkpoints: their names, which are complete, and which of them a save removes."""

import json
from pathlib import Path

import pytest

from moefold.checkpoint.checkpoint_meta import write_meta
from moefold.checkpoint.find_checkpoint import checkpoint_folder, complete_checkpoints, step_path
from moefold.checkpoint.integrity import quick_validate
from moefold.checkpoint.manifest import MANIFEST_FILE
from moefold.checkpoint.retention import remove_older
from moefold.checkpoint.writing_job import commit, tmp_checkpoint_path
from moefold.config.schema import Config
from moefold.config.sections.run import RunConfig
from tests.checkpoint.empty_checkpoints import meta, names, recipe, write


def test_the_folder_is_the_runs_own_unless_one_is_named():
    cfg = Config(run=RunConfig(dir="runs/a"))
    assert checkpoint_folder(cfg.run, cfg.checkpoint) == Path("runs/a/checkpoints")
    given = recipe(Path("/scratch/x"))
    assert checkpoint_folder(given.run, given.checkpoint) == Path("/scratch/x")


def test_names_of_step_folders():
    assert step_path(Path("c"), 100).name == "step-000100"
    assert step_path(Path("c"), 12345678).name == "step-12345678"


def test_complete_ones_in_order_and_nothing_else(tmp_path):
    paths = [write(tmp_path, step) for step in (1000000, 5, 20)]
    (tmp_path / "step-000030").mkdir()
    (tmp_path / "step-last").mkdir()
    tmp_checkpoint_path(tmp_path, 40, "job").mkdir()
    write_meta(tmp_checkpoint_path(tmp_path, 40, "job"), meta(40))
    assert complete_checkpoints(tmp_path) == [paths[1], paths[2], paths[0]]
    assert complete_checkpoints(tmp_path / "absent") == []


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "..", "", "a/b", "link"])
def test_a_manifest_cannot_lead_out_of_its_folder(tmp_path, name):
    path = write(tmp_path / "c", 5)
    (tmp_path / "secret").touch()
    (path / "link").symlink_to(tmp_path / "secret")
    manifest = json.loads((path / MANIFEST_FILE).read_text())
    manifest["files"][name] = {"size_bytes": 0, "sha256": ""}
    (path / MANIFEST_FILE).write_text(json.dumps(manifest))
    assert quick_validate(path) == [f"its {MANIFEST_FILE} cannot be read: file name {name!r} leads out of the folder"]


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        ("[" * 100_000, "it is nested deeper than 100 levels"),
        ('{"files": {"a": {"size_bytes": 1e400, "sha256": ""}}}', "it is not a manifest"),
        ("[]", "it is not a manifest"),
    ],
)
def test_a_strange_manifest_is_a_fault(tmp_path, content, fault):
    path = write(tmp_path, 5)
    (path / MANIFEST_FILE).write_text(content)
    assert quick_validate(path) == [f"its {MANIFEST_FILE} cannot be read: {fault}"]


def test_only_the_newest_are_kept_and_drafts_of_killed_runs_go(tmp_path):
    for step in (5, 10, 15):
        write(tmp_path, step)
    tmp_checkpoint_path(tmp_path, 12, "job").mkdir()
    (tmp_path / ".step-000002.old").mkdir()
    (tmp_path / "notes.txt").touch()
    newest = step_path(tmp_path, 15)
    remove_older(newest, 0)
    assert names(tmp_path) == ["notes.txt", "step-000005", "step-000010", "step-000015"]
    remove_older(newest, 2)
    assert names(tmp_path) == ["notes.txt", "step-000010", "step-000015"]


def test_checkpoints_of_every_so_many_steps_are_kept_too(tmp_path):
    for step in (5, 10, 15, 20, 25):
        write(tmp_path, step)
    remove_older(step_path(tmp_path, 25), 1, 10)
    assert names(tmp_path) == ["step-000010", "step-000020", "step-000025"]


def test_a_checkpoint_that_another_job_has_just_saved_is_not_replaced(tmp_path, monkeypatch):
    (write(tmp_path, 5) / "other").touch()
    draft = tmp_checkpoint_path(tmp_path, 5, "job")
    draft.mkdir()
    # It appears after the check that the name is free.
    monkeypatch.setattr(Path, "exists", lambda path: False)
    with pytest.raises(OSError, match=r"not empty|exists"):
        commit(draft, step_path(tmp_path, 5))
    monkeypatch.undo()
    assert (step_path(tmp_path, 5) / "other").exists()


def test_a_draft_replaces_a_checkpoint_of_its_step(tmp_path):
    (write(tmp_path, 5) / "old").touch()
    draft = tmp_checkpoint_path(tmp_path, 5, "job")
    draft.mkdir()
    (draft / "new").touch()
    commit(draft, step_path(tmp_path, 5))
    assert names(tmp_path) == ["step-000005"]
    assert names(tmp_path / "step-000005") == ["new"]
