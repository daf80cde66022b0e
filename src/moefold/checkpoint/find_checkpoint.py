"""Find the checkpoints of a folder: the newest, the best, and the damaged ones that are skipped.

A checkpoint is written under a temporary name and renamed once complete, so `step-000100` is complete or absent. Remote
folders cannot be renamed: a checkpoint is written under its final name, its manifest last, and is complete with the
manifest.
"""

import re
from collections.abc import Sequence
from pathlib import Path

from moefold.bounded_read import MAX_CONFIG_BYTES, read_json
from moefold.checkpoint.checkpoint_meta import META_FILE, read_meta
from moefold.checkpoint.integrity import quick_validate
from moefold.checkpoint.manifest import MANIFEST_FILE
from moefold.config.sections.checkpoint import CheckpointConfig
from moefold.config.sections.run import SETTINGS_FILE, RunConfig
from moefold.errors import ConfigError
from moefold.message_text import format_list
from moefold.remote_path import HUB_SCHEME, RemotePath, is_remote, to_path

_STEP_FOLDER_PATTERN = re.compile(r"step-(\d{6,})")


def checkpoint_folder(run: RunConfig, checkpoint: CheckpointConfig) -> Path:
    """Return the folder that contains the checkpoints of a run."""
    return to_path(checkpoint.dir) if checkpoint.dir else Path(run.dir) / "checkpoints"


def checkpoint_folder_key(checkpoint: CheckpointConfig) -> str:
    """Return the recipe key that determines `checkpoint_folder`."""
    return "checkpoint.dir" if checkpoint.dir else "run.dir"


def step_path(folder: Path, step: int) -> Path:
    """Return the path of the complete checkpoint of a step."""
    return folder / f"step-{step:06d}"


def unfinished_checkpoints(folder: Path) -> list[Path]:
    """Return the folders of unfinished saves in a local folder."""
    return list(folder.glob(".step-*.partial"))


def step_of(path: Path) -> int:
    """Return the step in a checkpoint's name, -1 for another name."""
    match = _STEP_FOLDER_PATTERN.fullmatch(path.name)
    return int(match[1]) if match else -1


def wrong_name_reason(path: Path, step: int) -> str:
    """Return why the name of a checkpoint is wrong (its metadata has another step), or empty if it is right."""
    right_name = step_path(path.parent, step).name
    return "" if step_of(path) in (step, -1) else f"is of step {step}; rename it to {right_name!r}"


def named_checkpoints(folder: Path) -> list[Path]:
    """Return all folders named like a checkpoint, oldest first.

    Each was complete once (see `writing_job.commit`), so a checkpoint that lacks a file is damaged. In a remote folder,
    checkpoints without a manifest were never complete, and are not returned.
    """
    if isinstance(folder, RemotePath):
        return [path for path in remote_step_folders(folder) if (path / MANIFEST_FILE).is_file()]
    return sorted((path for path in folder.glob("step-*") if step_of(path) >= 0 and path.is_dir()), key=step_of)


def has_unfinished_checkpoint(folder: Path) -> bool:
    """Return whether a folder has an unfinished save."""
    if isinstance(folder, RemotePath):
        return len(remote_step_folders(folder)) > len(named_checkpoints(folder))
    return bool(unfinished_checkpoints(folder))


def remote_step_folders(folder: RemotePath) -> list[RemotePath]:
    """Return all folders named like a checkpoint in a remote folder, finished or not, oldest first."""
    try:
        entries = folder.entries()
    except FileNotFoundError:
        return []
    return sorted(
        (folder / entry.name for entry in entries if entry.is_dir and step_of(folder / entry.name) >= 0), key=step_of
    )


def complete_checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints of a folder that have a description, oldest first."""
    return [path for path in named_checkpoints(folder) if (path / META_FILE).is_file()]


def locate_folder(path: Path) -> Path:
    """Return the folder of checkpoints for a path: the path itself, or the checkpoint folder of a run.

    Raises:
        ConfigError: there is no such folder.
    """
    if not path.is_dir():
        fault = "is a file" if path.exists() else "does not exist"
        raise ConfigError(f"{str(path)!r} {fault}; name a run, or a folder of checkpoints")
    inside = path / "checkpoints"
    if named_checkpoints(path) or named_checkpoints(inside):
        return inside if named_checkpoints(inside) else path
    return _configured_checkpoint_folder(path) or (inside if inside.is_dir() else path)


BEST_NAME = "best"
"""Last part of the path RUN/best, the checkpoint of a run with the lowest held-out loss."""


def best_of(checkpoints: Sequence[Path]) -> Path | None:
    """Return the first checkpoint with the lowest held-out loss, or None if no checkpoint has a loss."""
    losses: dict[Path, float] = {}
    for path in checkpoints:
        try:
            loss = read_meta(path).eval_loss
        except ConfigError:
            # The checkpoint is damaged; loading it reports that.
            continue
        if loss is not None:
            losses[path] = loss
    return min(losses, key=lambda path: losses[path]) if losses else None


def names_best(path: Path) -> bool:
    """Return whether a path is RUN/best or FOLDER_OF_CHECKPOINTS/best, and not an existing folder."""
    return path.name == BEST_NAME and not path.exists() and path.parent.is_dir()


def best_checkpoint(path: Path) -> Path:
    """Return the checkpoint that RUN/best names.

    Raises:
        ConfigError: no complete checkpoint of the run has a held-out loss.
    """
    best = best_of(complete_checkpoints(locate_folder(path.parent)))
    if best is None:
        raise ConfigError(
            f"{str(path)!r}: no complete checkpoint of {str(path.parent)!r} has a held-out loss; a run has them with "
            "train.eval_every, and checkpoint.every as a multiple of it"
        )
    return best


def newest_checkpoint(path: Path) -> Path | None:
    """Return the checkpoint for a path: itself, or the newest complete checkpoint of a run or checkpoint folder.

    RUN/best is the checkpoint with the lowest held-out loss.

    Raises:
        ConfigError: there is no such folder.
    """
    if (path / META_FILE).is_file():
        return path
    if names_best(path):
        return best_checkpoint(path)
    complete = complete_checkpoints(locate_folder(path))
    return complete[-1] if complete else None


def skipped_checkpoints(requested: Path, opened: Path) -> list[str]:
    """Return the later checkpoints without a description that `newest_checkpoint` skipped, each with the reason.

    Args:
        opened: the checkpoint that `newest_checkpoint` returned for it.
    """
    if (requested / META_FILE).is_file() or step_of(opened) < 0 or names_best(requested):
        return []
    later = [path for path in named_checkpoints(opened.parent) if step_of(path) > step_of(opened)]
    return [
        f"{path.name}: {format_list(quick_validate(path) or [f'it has no {META_FILE}'])}" for path in reversed(later)
    ]


def _configured_checkpoint_folder(run_dir: Path) -> Path | None:
    """Return checkpoint.dir from the config.json of a run folder, or None if it is not set or not a folder."""
    try:
        tree = read_json(run_dir / SETTINGS_FILE, MAX_CONFIG_BYTES)
        folder_name = tree["checkpoint"]["dir"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if not isinstance(folder_name, str) or not folder_name or folder_name.startswith(HUB_SCHEME):
        return None
    folder = to_path(folder_name)
    # The existence of a remote folder is checked when its checkpoints are listed.
    return folder if is_remote(folder) or folder.is_dir() else None


def locate_checkpoint(path: Path) -> Path:
    """Return `newest_checkpoint`, or raise if there is none.

    Raises:
        ConfigError: there is no complete checkpoint.
    """
    if (newest := newest_checkpoint(path)) is None:
        damaged = [
            f"{checkpoint.name}: {format_list(quick_validate(checkpoint))}"
            for checkpoint in named_checkpoints(locate_folder(path))
        ]
        faults = f" ({format_list(damaged)})" if damaged else ""
        raise ConfigError(
            f"{str(path)!r} is not a complete checkpoint and holds none{faults}; name a checkpoint, or a run with one "
            "(checkpoint.at_end=true, the default, or checkpoint.every)"
        )
    return newest
