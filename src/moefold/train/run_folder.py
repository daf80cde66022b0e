"""The folder that a run writes into: run.dir, or run.dir with a number where another run is in it. Torch-free.

A recipe names one folder, and is started many times: to go on after a stop, to train longer, with another setting.
What an earlier run wrote is continued or left alone, never cut off and never replaced.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

from moefold.checkpoint.folder import (
    checkpoint_folder,
    data_order_change,
    model_differences,
    named_checkpoints,
    quick_validate,
    read_meta,
    resume_candidate,
    step_of,
)
from moefold.config.load import config_to_dict
from moefold.config.schema import Config
from moefold.errors import format_list
from moefold.metrics.step import METRICS_FILE
from moefold.train.run_lock import LOCK_FILE, is_in_use

SETTINGS_FILE = "config.json"
Settings = dict[str, Any]
"""Every key of a run, as "section.key"."""


@dataclass(frozen=True)
class RunFolder:
    """Where a run writes, and why there."""

    cfg: Config
    """The recipe with that folder as its run.dir."""
    message: str = ""
    """What the log says of it: which run is left alone, or with what other settings one goes on; empty: nothing."""


def choose_run_folder(cfg: Config, locked_folder: Path | None = None) -> RunFolder:
    """Return the folder that a start of a recipe writes into.

    1. Where run.dir holds no run: run.dir.
    2. Where run.dir, run.dir-2, run.dir-3, ... hold the run that this command started: that folder. It is the same run
       if all settings that decide its result are the same; it goes on if it has fewer steps than run.steps, and is done
       if it has them all and run.steps and the mapping are the same too.
    3. Where run.dir has a checkpoint of fewer steps than run.steps, of the same model and data: run.dir, which goes on
       with the new settings.
    4. Else the first of run.dir-2, run.dir-3, ... that is free.

    Args:
        cfg: the recipe.
        locked_folder: a folder whose lock this process holds, and which is not in use by others therefore.
    """
    asked = Path(cfg.run.dir)
    if not _contains_run(asked, cfg):
        return RunFolder(cfg)
    family = [asked, *_numbered_folders(asked)]
    if cfg.checkpoint.dir:
        # All of them share the checkpoints: those are of the run that was started last.
        family.reverse()
    for folder in family:
        if _is_same_run(folder, cfg, locked_folder):
            return RunFolder(_in_folder(cfg, folder), "" if folder == asked else _found_message(asked, folder))
    if not (reason := _why_not_resumable(asked, cfg)):
        return RunFolder(cfg, _changes_message(_read_settings(asked), cfg))
    free = next(
        folder for folder in (_with_number(asked, number) for number in count(2)) if _is_free(folder, locked_folder)
    )
    note = f"run.dir={str(asked)!r} holds another run, which stays as it is ({reason}); this run is in {str(free)!r}"
    return RunFolder(_in_folder(cfg, free), note)


def _in_folder(cfg: Config, folder: Path) -> Config:
    return replace(cfg, run=replace(cfg.run, dir=str(folder)))


def _contains_run(folder: Path, cfg: Config) -> bool:
    """Whether a run has written steps or checkpoints into a folder."""
    metrics = folder / METRICS_FILE
    try:
        has_steps = metrics.is_file() and metrics.stat().st_size > 0
    except OSError:
        return False
    return has_steps or bool(named_checkpoints(checkpoint_folder(_in_folder(cfg, folder))))


def _with_number(run_dir: Path, number: int) -> Path:
    return run_dir.with_name(f"{run_dir.name}-{number}") if run_dir.name else run_dir / f"run-{number}"


def _numbered_folders(run_dir: Path) -> list[Path]:
    """The folders that have been numbered, in the order of their numbers."""
    found = {}
    stem = _with_number(run_dir, 0).name.removesuffix("0")
    for path in _with_number(run_dir, 0).parent.glob("*"):
        match = re.fullmatch(rf"{re.escape(stem)}([1-9]\d*)", path.name)
        if match and int(match[1]) > 1 and path.is_dir():
            found[int(match[1])] = path
    return [found[number] for number in sorted(found)]


def _is_free(folder: Path, locked_folder: Path | None) -> bool:
    """Whether a folder is absent, or was made by a run that wrote nothing before it ended."""
    if not folder.exists():
        return True
    if not folder.is_dir() or (folder != locked_folder and is_in_use(folder)):
        return False
    names = {entry.name for entry in folder.iterdir()} - {LOCK_FILE, SETTINGS_FILE}
    return not names or (names == {METRICS_FILE} and not (folder / METRICS_FILE).stat().st_size)


def _is_same_run(folder: Path, cfg: Config, locked_folder: Path | None) -> bool:
    """Whether a folder holds the run that this command started: to go on with, to wait for, or done already."""
    cfg = _in_folder(cfg, folder)
    settings = _read_settings(folder)
    if settings is None or cfg.checkpoint.resume != "auto" or not _contains_run(folder, cfg):
        return False
    differing = _changed_keys(settings, cfg)
    if any(not _is_free_to_change(key) for key in differing):
        return False
    if cfg.checkpoint.dir and "checkpoint.dir" in differing:
        return False
    newest = _newest_intact_checkpoint(cfg)
    if newest is None:
        # All damaged: the start refuses that. None yet: a job that still runs may be about to save its first one.
        return bool(named_checkpoints(checkpoint_folder(cfg))) or (folder != locked_folder and is_in_use(folder))
    if step_of(newest) < cfg.run.steps:
        return True
    ignored = ("parallel.",) if cfg.parallel.elastic else ()
    return not any(_invalidates_finished_run(key) and not key.startswith(ignored) for key in differing)


def _why_not_resumable(run_dir: Path, cfg: Config) -> str:
    """Why the recipe cannot go on with what run.dir holds, in words; empty if it can."""
    wish = cfg.checkpoint.resume
    if wish == "never":
        return "checkpoint.resume='never'"
    named = named_checkpoints(checkpoint_folder(cfg))
    if wish != "auto":
        given = Path(wish)
        # Those of later steps are refused by name at the start.
        stays = any(path.resolve() == given.resolve() or step_of(path) > step_of(given) for path in named)
        return "" if stays else f"{wish!r} is of another run"
    newest = _newest_intact_checkpoint(cfg)
    if newest is None:
        # Damaged ones are refused by name at the start.
        return "" if named else "it has no checkpoint to go on from"
    meta, settings = read_meta(newest), _read_settings(run_dir)
    if meta.origin:
        # Weights alone: refused at the start, with the way out.
        return ""
    other = model_differences(meta.model, cfg.model) or data_order_change(meta, cfg)
    if other:
        return f"of another model or other data: {other}"
    if meta.step < cfg.run.steps or settings is None:
        return ""
    changed = [
        key for key in _changed_keys(settings, cfg) if not _is_free_to_change(key) or _invalidates_finished_run(key)
    ]
    return f"it has {meta.step} steps, with other settings: {format_list([_describe_change(key, settings, cfg) for key in changed])}"


def _newest_intact_checkpoint(cfg: Config) -> Path | None:
    """The newest checkpoint of the run that sizes of files find nothing wrong with."""
    damaged: list[str] = []
    while (path := resume_candidate(cfg, damaged)) is not None and quick_validate(path):
        damaged.append(str(path))
    return path


def _read_settings(folder: Path) -> Settings | None:
    """The settings of the run that a folder holds; None if it does not tell."""
    try:
        tree = json.loads((folder / SETTINGS_FILE).read_text(encoding="utf-8"))
        return {f"{section}.{key}": value for section, keys in tree.items() for key, value in keys.items()}
    except (OSError, ValueError, AttributeError, RecursionError):
        return None


def _flatten(cfg: Config) -> Settings:
    return {f"{section}.{key}": value for section, keys in config_to_dict(cfg).items() for key, value in keys.items()}


def _changed_keys(settings: Settings, cfg: Config) -> list[str]:
    """The keys whose values differ; one that an earlier version did not know counts as its default."""
    before = _flatten(Config()) | settings
    return [key for key, value in _flatten(cfg).items() if before[key] != value]


def _is_free_to_change(key: str) -> bool:
    """Whether a run stays the same run with another value of a key: folder, length, mapping, what is written when."""
    section = key.partition(".")[0]
    if key in ("run.dir", "run.steps"):
        return True
    return section in ("parallel", "metrics", "faults") or (section == "checkpoint" and key != "checkpoint.init_from")


def _invalidates_finished_run(key: str) -> bool:
    """Whether a finished run with another value of a key is not what was asked for, though it would be the same run."""
    return key == "run.steps" or key.startswith("parallel.")


def _describe_change(key: str, settings: Mapping[str, Any], cfg: Config) -> str:
    before, now = (_flatten(Config()) | dict(settings))[key], _flatten(cfg)[key]
    return f"{key}={json.dumps(now)} (it has {json.dumps(before)})"


def _found_message(run_dir: Path, folder: Path) -> str:
    return f"run.dir={str(run_dir)!r} holds another run; this run is in {str(folder)!r}"


def _changes_message(settings: Settings | None, cfg: Config) -> str:
    """With what other settings a run goes on; empty if it does with the same."""
    if settings is None or cfg.checkpoint.resume != "auto" or _newest_intact_checkpoint(cfg) is None:
        return ""
    changed = [
        _describe_change(key, settings, cfg) for key in _changed_keys(settings, cfg) if not _is_free_to_change(key)
    ]
    return f"the run in {cfg.run.dir!r} goes on with other settings: {', '.join(changed)}" if changed else ""
