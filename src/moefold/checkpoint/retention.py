"""Retention: which checkpoints are kept, and removal of the others, which leaves no partial folder after a kill."""

import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from moefold.checkpoint.find_checkpoint import (
    best_of,
    complete_checkpoints,
    named_checkpoints,
    remote_step_folders,
    step_of,
    unfinished_checkpoints,
)
from moefold.checkpoint.manifest import MANIFEST_FILE
from moefold.remote_path import RemotePath


def remove_older(
    newest: Path,
    keep: int,
    keep_every: int = 0,
    may_remove: Callable[[Path], bool] = lambda path: True,
    *,
    keeps_best: bool = False,
) -> None:
    """Delete checkpoints that retention does not keep, and temporary folders of killed runs.

    A resume skipped checkpoints of later steps than the newest as damaged: they are not counted and not deleted. The
    same applies to checkpoints without a description. Checkpoints of another job stay.

    Args:
        newest: the new checkpoint. It stays.
        keep: number of newest complete checkpoints to keep. 0 keeps all.
        keep_every: checkpoints of steps divisible by this number are always kept. 0: none.
        may_remove: see `WritingJob.may_replace`.
        keeps_best: whether the checkpoint with the lowest held-out loss is also kept.
    """
    folder = newest.parent
    done = [path for path in complete_checkpoints(folder) if step_of(path) <= step_of(newest)]
    older = done[:-keep] if keep else []
    best = best_of(done) if keeps_best and older else None
    for path in older:
        if path != best and (not keep_every or step_of(path) % keep_every) and may_remove(path):
            remove_checkpoint(path)
    if isinstance(folder, RemotePath):
        kept_names = {path.name for path in named_checkpoints(folder)} | {newest.name}
        for unfinished in remote_step_folders(folder):
            if unfinished.name not in kept_names and may_remove(unfinished):
                unfinished.delete_tree()
        return
    for path in unfinished_checkpoints(folder):
        if may_remove(path):
            remove_folder(path)
    for path in folder.glob(".step-*.old"):
        # Another job may remove it at the same time.
        shutil.rmtree(path, ignore_errors=True)


def remove_folder(path: Path) -> None:
    """Delete a local folder that another job may delete at the same time."""
    with suppress(FileNotFoundError):
        shutil.rmtree(path)


def remove_checkpoint(path: Path) -> None:
    """Delete a checkpoint atomically: after a kill, no partial folder remains under its name.

    The manifest of a remote checkpoint is deleted first: without it the rest is not a checkpoint: the next save deletes
    it.
    """
    if isinstance(path, RemotePath):
        (path / MANIFEST_FILE).unlink(missing_ok=True)
        path.delete_tree()
        return
    doomed = path.with_name(f".{path.name}.old")
    doomed.unlink() if doomed.is_symlink() else shutil.rmtree(doomed, ignore_errors=True)
    try:
        path.rename(doomed)
    except FileNotFoundError:
        # Another job, which found it at its start, has just deleted it.
        return
    if doomed.is_symlink():
        doomed.unlink()
    else:
        remove_folder(doomed)
