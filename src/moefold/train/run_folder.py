"""The run folder: run.dir, or run.dir with a number if run.dir holds another run.

One recipe may be started many times: to resume after a stop, to train longer, or with other settings. The files of an
earlier run are continued or left unchanged. Only a run that ended before its first checkpoint starts over in place, as
it has no state to resume from.
"""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any, Self

from moefold.checkpoint.checkpoint_meta import CheckpointMeta, read_meta
from moefold.checkpoint.find_checkpoint import (
    checkpoint_folder,
    has_unfinished_checkpoint,
    named_checkpoints,
    step_of,
)
from moefold.checkpoint.resume import newest_intact_checkpoint
from moefold.checkpoint.sample_order import SampleOrder, data_order_change, moved_data_message, sample_order
from moefold.config.base.layer_words import parse_layers, spell_layers
from moefold.config.base.part import without_source
from moefold.config.keys.annotations import keys_of_same_run
from moefold.config.keys.paths import flat_settings
from moefold.config.schema import Config, config_to_dict
from moefold.config.sections.checkpoint import CheckpointConfig
from moefold.config.sections.data import DataConfig
from moefold.config.sections.run import SETTINGS_FILE, RunConfig
from moefold.config.tables.toml_text import toml_value
from moefold.data.fingerprint import LOCATION_KEYS, fingerprint
from moefold.host.folder_lock import LOCK_FILE, is_in_use
from moefold.message_text import format_list
from moefold.metrics.reader import METRICS_FILE, read_records
from moefold.remote_path import to_path
from moefold.train.resolved_keys import keep_resolved

Settings = dict[str, Any]
"""Every key of a run, as "section.key"."""


@dataclass(frozen=True)
class RunFolder:
    """The folder that a run writes to, with the reason for the choice."""

    cfg: Config
    """The recipe with the chosen folder as its run.dir."""
    message: str = ""
    """Log message: the run that is left unchanged, or the settings changed on resume. It may be empty."""


def choose_run_folder(
    cfg: Config, locked_folder: Path | None = None, left_out: frozenset[str] = frozenset()
) -> RunFolder:
    """Choose the folder that a start of a recipe writes to.

    1. If run.dir holds no run, and no job of another run is there: run.dir.
    2. If run.dir, run.dir-2, run.dir-3, ... holds the run that this command started: that folder. It is the same run if
       all settings that affect its result are the same. It resumes if it has fewer steps than run.steps, and is
       finished if it has all steps and both run.steps and the parallel mapping are the same too.
    3. If one of these holds the same run, which ended before its first checkpoint: that folder, and the run starts
    over. 4. If run.dir has a checkpoint of fewer steps than run.steps, of the same model and data, and no job of
    another run is there: run.dir, which resumes with the new settings.
    5. Otherwise the first free folder of run.dir-2, run.dir-3, ...

    Args:
        locked_folder: a folder whose lock this process holds, and which therefore no other job uses.
        left_out: keys that the recipe leaves out, which keep the values of a continued run.
    """
    run_dir = Path(cfg.run.dir)
    configured = cfg

    def resolved(folder: Path) -> Config:
        return keep_resolved(configured, _read_settings(folder) or {}, left_out)

    cfg = resolved(run_dir)
    is_busy = run_dir != locked_folder and _is_busy_with_other_run(run_dir, _settings(cfg))
    if not is_busy and not _contains_run(run_dir, cfg.checkpoint):
        return RunFolder(configured)
    candidates = [run_dir, *_numbered_folders(run_dir)]
    if cfg.checkpoint.dir:
        # All these folders share one checkpoint folder, which belongs to the run that was started last.
        candidates.reverse()
    for folder in candidates:
        cfg = resolved(folder)
        if _is_same_run(folder, cfg, locked_folder):
            message = f"run.dir={str(run_dir)!r} holds another run; this run is in {str(folder)!r}"
            return RunFolder(_in_folder(cfg, folder), "" if folder == run_dir else message)
    for folder in candidates:
        cfg = resolved(folder)
        if _starts_over(folder, cfg):
            message = f"the run in {str(folder)!r} ended before its first checkpoint: it starts over"
            return RunFolder(_in_folder(cfg, folder), message)
    cfg = resolved(run_dir)
    reason = "a job is training it" if is_busy else _not_resumable_reason(run_dir, cfg)
    if not reason:
        return RunFolder(cfg, _changes_message(_read_settings(run_dir), cfg))
    free_dir = next(
        folder for folder in (_with_number(run_dir, number) for number in count(2)) if is_free(folder, locked_folder)
    )
    message = (
        f"run.dir={str(run_dir)!r} holds another run, which stays as it is ({reason}); this run is in {str(free_dir)!r}"
    )
    return RunFolder(_in_folder(configured, free_dir), message)


def _in_folder(cfg: Config, folder: Path) -> Config:
    return replace(cfg, run=replace(cfg.run, dir=str(folder)))


def _contains_run(folder: Path, checkpoint: CheckpointConfig) -> bool:
    """Return whether a run has written steps or checkpoints to a folder."""
    metrics = folder / METRICS_FILE
    try:
        has_steps = metrics.is_file() and metrics.stat().st_size > 0
    except OSError:
        return False
    return has_steps or bool(named_checkpoints(checkpoint_folder(RunConfig(dir=str(folder)), checkpoint)))


def _with_number(run_dir: Path, number: int) -> Path:
    return run_dir.with_name(f"{run_dir.name}-{number}") if run_dir.name else run_dir / f"run-{number}"


def _numbered_folders(run_dir: Path) -> list[Path]:
    """Return the numbered siblings of a run folder, in order of their numbers."""
    folders = {}
    stem = _with_number(run_dir, 0).name.removesuffix("0")
    for path in _with_number(run_dir, 0).parent.glob("*"):
        match = re.fullmatch(rf"{re.escape(stem)}([1-9]\d*)", path.name)
        if match and int(match[1]) > 1 and path.is_dir():
            folders[int(match[1])] = path
    return [folders[number] for number in sorted(folders)]


def is_free(folder: Path, locked_folder: Path | None) -> bool:
    """Return whether a folder is absent, or left over from a run that wrote nothing."""
    if not folder.exists():
        return True
    if not folder.is_dir() or (folder != locked_folder and is_in_use(folder)):
        return False
    names = {entry.name for entry in folder.iterdir()} - {LOCK_FILE, SETTINGS_FILE}
    return not names or (names == {METRICS_FILE} and not (folder / METRICS_FILE).stat().st_size)


def _is_same_run(folder: Path, cfg: Config, locked_folder: Path | None) -> bool:
    """Return whether a folder holds the run that this command started: to resume, to wait for, or finished already."""
    cfg = _in_folder(cfg, folder)
    settings = _read_settings(folder)
    if settings is None or cfg.checkpoint.resume != "auto" or not _contains_run(folder, cfg.checkpoint):
        return False
    change = _SettingsChange.of(settings, _settings(cfg))
    differing = change.keys
    moved_keys = {f"data.{key}" for key in LOCATION_KEYS}.intersection(differing)
    if set(change.keys_of_run) - moved_keys:
        return False
    if cfg.checkpoint.dir and "checkpoint.dir" in differing:
        return False
    newest = newest_intact_checkpoint(cfg.run, cfg.checkpoint)
    if moved_keys and (newest is None or _data_difference(read_meta(newest), cfg.data, sample_order(cfg))):
        return False
    if newest is None:
        # All checkpoints are damaged: the start refuses that. No checkpoint: a running job may be about to save one.
        return bool(named_checkpoints(checkpoint_folder(cfg.run, cfg.checkpoint))) or (
            folder != locked_folder and is_in_use(folder)
        )
    if step_of(newest) < cfg.run.steps:
        return True
    ignored = ("parallel.",) if cfg.parallel.elastic else ()
    return not any(_invalidates_finished_run(key) and not key.startswith(ignored) for key in differing)


def _is_busy_with_other_run(folder: Path, now: Settings) -> bool:
    """Return whether a job holds the lock of a folder that has the settings of another run."""
    if not is_in_use(folder):
        return False
    settings = _read_settings(folder)
    return settings is not None and bool(_SettingsChange.of(settings, now).keys_of_run)


def _starts_over(folder: Path, cfg: Config) -> bool:
    """Return whether a folder holds the run that this command started, which ended before its first checkpoint.

    A run without saves has ended as intended. A run with all steps done may lack checkpoints because a user removed
    them. The metrics of both are kept.
    """
    cfg = _in_folder(cfg, folder)
    settings = _read_settings(folder)
    if settings is None or cfg.checkpoint.resume != "auto" or not cfg.checkpoint.saves:
        return False
    saved = checkpoint_folder(cfg.run, cfg.checkpoint)
    if not _contains_run(folder, cfg.checkpoint) or named_checkpoints(saved):
        return False
    change = _SettingsChange.of(settings, _settings(cfg))
    differing = change.keys
    if change.keys_of_run or "checkpoint.dir" in differing:
        return False
    before = change.before
    last_step = max((record["step"] for record in read_records(folder)), default=0)
    every = before["checkpoint.every"]
    if (every and last_step > every) or not (every or before["checkpoint.at_end"]):
        return False
    return last_step < before["run.steps"] or has_unfinished_checkpoint(saved)


def _not_resumable_reason(run_dir: Path, cfg: Config) -> str:
    """Return why the recipe cannot resume from run.dir, or empty if it can."""
    resume = cfg.checkpoint.resume
    if resume == "never":
        return "checkpoint.resume='never'"
    checkpoints = named_checkpoints(checkpoint_folder(cfg.run, cfg.checkpoint))
    if resume != "auto":
        source = to_path(resume)
        # Checkpoints of later steps are refused by name at the start.
        is_same_run = any(path.resolve() == source.resolve() or step_of(path) > step_of(source) for path in checkpoints)
        return "" if is_same_run else f"{resume!r} is of another run"
    newest = newest_intact_checkpoint(cfg.run, cfg.checkpoint)
    if newest is None:
        # Damaged checkpoints are refused by name at the start.
        return "" if checkpoints else "it has no checkpoint to go on from"
    meta = read_meta(newest)
    settings = _read_settings(run_dir)
    if meta.origin:
        # A checkpoint of weights only: refused at the start, with the way out.
        return ""
    from moefold.checkpoint.model_differences import model_differences

    difference = model_differences(meta.model, cfg.model) or _data_difference(meta, cfg.data, sample_order(cfg))
    if difference:
        return f"of another model or other data: {difference}"
    if meta.step < cfg.run.steps or settings is None:
        return ""
    change = _SettingsChange.of(settings, _settings(cfg))
    changed = [key for key in change.keys if key in change.keys_of_run or _invalidates_finished_run(key)]
    return f"it has {meta.step} steps, with other settings: {format_list(change.describe(changed))}"


def _data_difference(meta: CheckpointMeta, data: DataConfig, order: SampleOrder) -> str:
    """Describe how the data of a checkpoint's run and of the recipe differ. Files of the same name count as the same.

    Files that have changed under their names are refused by name at the start.
    """
    # Only files with different names need to be read for the answer.
    digests = fingerprint(data) if meta.data_files and moved_data_message(meta, order) else None
    return data_order_change(meta, order, digests, drops_files=data.drops_files)


def _read_settings(folder: Path) -> Settings | None:
    """Return the settings of the run in a folder, or None if they cannot be read."""
    try:
        tree = json.loads((folder / SETTINGS_FILE).read_text(encoding="utf-8"))
        from moefold.config.upgrade.recipe import upgraded

        return _flatten(upgraded(tree)[0])
    except (OSError, ValueError, AttributeError, TypeError, RecursionError):
        return None


def _settings(cfg: Config) -> Settings:
    return _flatten(config_to_dict(cfg))


def _flatten(tree: Mapping[str, Any]) -> Settings:
    """Return values by name, layers in the shortest form, files of external parts by their content only."""
    settings = flat_settings(
        {
            f"{section}.{key}": without_source(value, "file")
            for section, keys in tree.items()
            for key, value in keys.items()
        }
    )
    if layers := settings.get("model.layers"):
        settings["model.layers"] = spell_layers(parse_layers(layers))
    return settings


@dataclass(frozen=True)
class _SettingsChange:
    """Settings of a run in a folder, and the settings of a recipe."""

    before: Settings
    """Recorded settings. A key that an earlier version lacked has its default."""
    now: Settings

    @classmethod
    def of(cls, recorded: Settings, now: Settings) -> Self:
        """Complete recorded settings with the defaults of missing keys, and marks for the tables that they contain."""
        from moefold.checkpoint.model_differences import GIVEN

        tables = {key.rpartition(".")[0]: GIVEN for key in recorded}
        return cls(_settings(Config()) | tables | recorded, now)

    @property
    def keys(self) -> list[str]:
        """Keys whose values differ."""
        return [key for key, value in self.now.items() if self.before.get(key) != value]

    @property
    def keys_of_run(self) -> list[str]:
        """Changed keys that make another run: all but folder, length, mapping, logging and saving."""
        free = keys_of_same_run()
        return [key for key in self.keys if ".".join(key.split(".")[:2]) not in free]

    def describe(self, keys: Iterable[str]) -> list[str]:
        """Return a text for each of the keys."""
        return [f"{key}={toml_value(self.now[key])} (it has {toml_value(self.before.get(key))})" for key in keys]


def _invalidates_finished_run(key: str) -> bool:
    """Return whether changing a key asks for more than the finished run, although it is the same run."""
    return key == "run.steps" or key.startswith("parallel.")


def _changes_message(settings: Settings | None, cfg: Config) -> str:
    """Return a message with the settings that changed on resume, or empty if none did."""
    if settings is None or cfg.checkpoint.resume != "auto" or newest_intact_checkpoint(cfg.run, cfg.checkpoint) is None:
        return ""
    change = _SettingsChange.of(settings, _settings(cfg))
    changed = change.describe(change.keys_of_run)
    return f"the run in {cfg.run.dir!r} goes on with other settings: {', '.join(changed)}" if changed else ""
