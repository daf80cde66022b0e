"""The folder that a run writes into: run.dir, or run.dir with a number where another run is in it. Torch-free.

A recipe names one folder, and is started many times: to go on after a stop, to train longer, with another setting.
What an earlier run wrote is continued or left alone, never cut off and never replaced.

One job at a time writes into a folder: its first rank holds a lock there, which ends with its process. Torch-free.

Two jobs in one folder take the lines of each other's metrics and the drafts of each other's checkpoints away. It comes
about by hand, and by an elastic launcher that takes a node for lost that trains on.
"""

import fcntl
import json
import logging
import os
import re
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from io import FileIO
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from moefold.checkpoint.checkpoint_dir import (
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
from moefold.errors import ConfigError, format_list
from moefold.metrics.step_metrics import METRICS_FILE

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
    meta = read_meta(newest)
    settings = _read_settings(run_dir)
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
    before = (_flatten(Config()) | dict(settings))[key]
    now = _flatten(cfg)[key]
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


LOCK_FILE = ".lock"
MAX_LOCK_WAIT_S = 100.0
"""A job that was given up may take so long to end; NFS keeps the locks of a host that is lost for 90 s (its lease)."""
_POLL_INTERVAL_S = 0.2

logger = logging.getLogger(__name__)


def is_in_use(folder: Path) -> bool:
    """Return whether another process holds the lock of a folder; not for a folder whose lock this process holds.

    Closing the file gives up every lock that the process has on it: that is how the locks of fcntl are.
    """
    try:
        file = (folder / LOCK_FILE).open("r+b", buffering=0)
    except OSError:
        return False
    with file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            return True
        except OSError:
            # A disk without locks: nothing tells.
            return False
    return False


class RunLock:
    """Context manager: holds `folder`, made if need be, for this process; it waits a while for another job to end.

    The lock is one of the process (fcntl), so that no child inherits it; a folder on a disk without such locks is used
    without one, with a warning. A job that is refused before it writes anything leaves no folder that it made.

    Args:
        folder: where one job at a time may write.
        key: of the recipe, that names it.
        wait_s: how long to wait for the one that holds it.
    """

    def __init__(self, folder: Path, key: str, wait_s: float) -> None:
        self._folder = folder
        self._key = key
        self._wait_s = wait_s
        self._file: FileIO | None = None
        self._created_folders: list[Path] = []

    def __enter__(self) -> Self:
        """Take the lock.

        Raises:
            ConfigError: another process still holds it after the wait, or the folder cannot be written.
        """
        path = self._folder / LOCK_FILE
        self._created_folders = [folder for folder in (self._folder, *self._folder.parents) if not folder.exists()]
        self._file = self._open(path)
        deadline_s = time.monotonic() + self._wait_s
        says_so = True
        while not self._try_acquire(path):
            if time.monotonic() >= deadline_s:
                holder = self._describe_owner()
                self._file.close()
                raise ConfigError(
                    f"{self._key}={str(self._folder)!r} is in use by another job ({holder}), which did not end within "
                    f"{self._wait_s:g} s; wait for it or end it, or set another {self._key} (if its host is lost for "
                    f"good, remove {str(path)!r})"
                )
            if says_so:
                logger.warning("%s=%r is in use (%s): waiting", self._key, str(self._folder), self._describe_owner())
            says_so = False
            time.sleep(_POLL_INTERVAL_S)
        try:
            self._write_owner()
        except OSError as error:
            self._file.close()
            raise self._unwritable_error(error) from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Let others in."""
        if self._file is None:
            return
        if (
            kind is not None
            and self._created_folders
            and [entry.name for entry in self._folder.iterdir()] == [LOCK_FILE]
        ):
            (self._folder / LOCK_FILE).unlink()
            # As far up as nobody else has put anything there.
            with suppress(OSError):
                for folder in self._created_folders:
                    folder.rmdir()
        self._file.close()

    def _open(self, path: Path) -> FileIO:
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            return path.open("a+b", buffering=0)
        except OSError as error:
            raise self._unwritable_error(error) from error

    def _try_acquire(self, path: Path) -> bool:
        assert self._file is not None
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not path.exists() or not os.path.samestat(path.stat(), os.fstat(self._file.fileno())):
                # The job that had it made the folder, wrote nothing and took it away: this is no longer its file.
                self._file.close()
                self._file = self._open(path)
                return False
        except (BlockingIOError, PermissionError):
            return False
        except OSError as error:
            logger.warning(
                "%s cannot be locked (%s): see that no other job writes there", self._folder / LOCK_FILE, error.strerror
            )
        return True

    def _write_owner(self) -> None:
        assert self._file is not None
        word = {
            "host": socket.gethostname(),
            "process": os.getpid(),
            "since": f"{datetime.now(UTC):%Y-%m-%d %H:%M:%SZ}",
        }
        if os.fstat(self._file.fileno()).st_size:
            self._file.truncate(0)
        self._file.write(json.dumps(word).encode() + b"\n")

    def _unwritable_error(self, error: OSError) -> ConfigError:
        return ConfigError(
            f"{self._key}={str(self._folder)!r} cannot be written: {error.strerror}; choose another, or make room"
        )

    def _describe_owner(self) -> str:
        """Who holds it, as far as that has been written."""
        assert self._file is not None
        self._file.seek(0)
        try:
            word = json.loads(self._file.read())
            return f"process {word['process']} on {word['host']}, since {word['since']}"
        except (ValueError, KeyError, TypeError):
            return "which has not said its name"
