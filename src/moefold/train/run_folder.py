"""The run folder: run.dir, or run.dir with a number if run.dir holds another run, and its lock file. Torch-free.

One recipe may be started many times: to resume after a stop, to train longer, or with other settings. The files of an
earlier run are continued or left alone, never truncated and never replaced.

The first rank of a job locks the folder until its process ends, as two jobs in one folder would destroy each other's
metrics and half-written checkpoints. This happens when a user starts a job twice, or when torchrun restarts a job while
the old node still trains.
"""

import fcntl
import json
import logging
import os
import re
import socket
import struct
import sys
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
    CheckpointMeta,
    checkpoint_folder,
    data_order_change,
    model_differences,
    moved_data_message,
    named_checkpoints,
    quick_validate,
    read_meta,
    resume_candidate,
    step_of,
)
from moefold.config.load import config_to_dict
from moefold.config.schema import Config
from moefold.data.fingerprint import fingerprint
from moefold.data.moved_files import LOCATION_KEYS
from moefold.errors import ConfigError, format_list
from moefold.metrics.step_metrics import METRICS_FILE
from moefold.remote_path import to_path

SETTINGS_FILE = "config.json"
Settings = dict[str, Any]
"""Every key of a run, as "section.key"."""


@dataclass(frozen=True)
class RunFolder:
    """The folder that a run writes to, with the reason for the choice."""

    cfg: Config
    """The recipe with the chosen folder as its run.dir."""
    message: str = ""
    """Log message: the run that is left alone, or the settings changed on resume; may be empty."""


def choose_run_folder(cfg: Config, locked_folder: Path | None = None) -> RunFolder:
    """Choose the folder that a start of a recipe writes to.

    1. If run.dir holds no run: run.dir.
    2. If run.dir, run.dir-2, run.dir-3, ... holds the run that this command started: that folder. It is the same run if
       all settings that affect its result are the same. It resumes if it has fewer steps than run.steps, and is
       finished if it has all steps and both run.steps and the parallel mapping are the same too.
    3. If run.dir has a checkpoint of fewer steps than run.steps, of the same model and data: run.dir, which resumes
       with the new settings.
    4. Else the first free one of run.dir-2, run.dir-3, ...

    Args:
        cfg: the recipe.
        locked_folder: a folder whose lock this process holds, and which therefore no other job uses.
    """
    run_dir = Path(cfg.run.dir)
    if not _contains_run(run_dir, cfg):
        return RunFolder(cfg)
    candidates = [run_dir, *_numbered_folders(run_dir)]
    if cfg.checkpoint.dir:
        # All of them share one checkpoint folder, which belongs to the run that was started last.
        candidates.reverse()
    for folder in candidates:
        if _is_same_run(folder, cfg, locked_folder):
            return RunFolder(_in_folder(cfg, folder), "" if folder == run_dir else _found_message(run_dir, folder))
    if not (reason := _not_resumable_reason(run_dir, cfg)):
        return RunFolder(cfg, _changes_message(_read_settings(run_dir), cfg))
    free = next(
        folder for folder in (_with_number(run_dir, number) for number in count(2)) if _is_free(folder, locked_folder)
    )
    message = (
        f"run.dir={str(run_dir)!r} holds another run, which stays as it is ({reason}); this run is in {str(free)!r}"
    )
    return RunFolder(_in_folder(cfg, free), message)


def _in_folder(cfg: Config, folder: Path) -> Config:
    return replace(cfg, run=replace(cfg.run, dir=str(folder)))


def _contains_run(folder: Path, cfg: Config) -> bool:
    """Return whether a run has written steps or checkpoints to a folder."""
    metrics = folder / METRICS_FILE
    try:
        has_steps = metrics.is_file() and metrics.stat().st_size > 0
    except OSError:
        return False
    return has_steps or bool(named_checkpoints(checkpoint_folder(_in_folder(cfg, folder))))


def _with_number(run_dir: Path, number: int) -> Path:
    return run_dir.with_name(f"{run_dir.name}-{number}") if run_dir.name else run_dir / f"run-{number}"


def _numbered_folders(run_dir: Path) -> list[Path]:
    """Return the numbered siblings of a run folder, in order of their numbers."""
    found = {}
    stem = _with_number(run_dir, 0).name.removesuffix("0")
    for path in _with_number(run_dir, 0).parent.glob("*"):
        match = re.fullmatch(rf"{re.escape(stem)}([1-9]\d*)", path.name)
        if match and int(match[1]) > 1 and path.is_dir():
            found[int(match[1])] = path
    return [found[number] for number in sorted(found)]


def _is_free(folder: Path, locked_folder: Path | None) -> bool:
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
    if settings is None or cfg.checkpoint.resume != "auto" or not _contains_run(folder, cfg):
        return False
    differing = _changed_keys(settings, cfg)
    moved = {f"data.{key}" for key in LOCATION_KEYS}.intersection(differing)
    if any(not _is_free_to_change(key) for key in differing if key not in moved):
        return False
    if cfg.checkpoint.dir and "checkpoint.dir" in differing:
        return False
    newest = _newest_intact_checkpoint(cfg)
    if moved and (newest is None or _data_difference(read_meta(newest), cfg)):
        return False
    if newest is None:
        # All checkpoints are damaged: the start rejects that. No checkpoint: a running job may be about to save one.
        return bool(named_checkpoints(checkpoint_folder(cfg))) or (folder != locked_folder and is_in_use(folder))
    if step_of(newest) < cfg.run.steps:
        return True
    ignored = ("parallel.",) if cfg.parallel.elastic else ()
    return not any(_invalidates_finished_run(key) and not key.startswith(ignored) for key in differing)


def _not_resumable_reason(run_dir: Path, cfg: Config) -> str:
    """Return why the recipe cannot resume from run.dir; empty if it can."""
    resume = cfg.checkpoint.resume
    if resume == "never":
        return "checkpoint.resume='never'"
    checkpoints = named_checkpoints(checkpoint_folder(cfg))
    if resume != "auto":
        given = to_path(resume)
        # Checkpoints of later steps are rejected by name at the start.
        is_same_run = any(path.resolve() == given.resolve() or step_of(path) > step_of(given) for path in checkpoints)
        return "" if is_same_run else f"{resume!r} is of another run"
    newest = _newest_intact_checkpoint(cfg)
    if newest is None:
        # Damaged checkpoints are rejected by name at the start.
        return "" if checkpoints else "it has no checkpoint to go on from"
    meta = read_meta(newest)
    settings = _read_settings(run_dir)
    if meta.origin:
        # A checkpoint of weights only: rejected at the start, with the way out.
        return ""
    difference = model_differences(meta.model, cfg.model) or _data_difference(meta, cfg)
    if difference:
        return f"of another model or other data: {difference}"
    if meta.step < cfg.run.steps or settings is None:
        return ""
    changed = [
        key for key in _changed_keys(settings, cfg) if not _is_free_to_change(key) or _invalidates_finished_run(key)
    ]
    return (
        f"it has {meta.step} steps, with other settings: "
        f"{format_list([_describe_change(key, settings, cfg) for key in changed])}"
    )


def _data_difference(meta: CheckpointMeta, cfg: Config) -> str:
    """Describe how the data of a checkpoint's run differs from the recipe's; files under the same names count as same.

    Files that have changed under their names are rejected by name at the start.
    """
    # Only files that are named in another way need to be read for the answer.
    needs_content = bool(meta.data_files and moved_data_message(meta, cfg))
    return data_order_change(meta, cfg, fingerprint(cfg.data) if needs_content else None)


def _newest_intact_checkpoint(cfg: Config) -> Path | None:
    """Return the newest checkpoint of the run whose file sizes are right."""
    damaged: list[str] = []
    while (path := resume_candidate(cfg, damaged)) is not None and quick_validate(path):
        damaged.append(str(path))
    return path


def _read_settings(folder: Path) -> Settings | None:
    """Return the settings of the run in a folder; None if they cannot be read."""
    try:
        tree = json.loads((folder / SETTINGS_FILE).read_text(encoding="utf-8"))
        return {f"{section}.{key}": value for section, keys in tree.items() for key, value in keys.items()}
    except (OSError, ValueError, AttributeError, RecursionError):
        return None


def _flatten(cfg: Config) -> Settings:
    return {f"{section}.{key}": value for section, keys in config_to_dict(cfg).items() for key, value in keys.items()}


def _changed_keys(settings: Settings, cfg: Config) -> list[str]:
    """Return the keys whose values differ; a key that an earlier version lacked counts as its default."""
    before = _flatten(Config()) | settings
    return [key for key, value in _flatten(cfg).items() if before[key] != value]


def _is_free_to_change(key: str) -> bool:
    """Return whether a run stays the same run if a key changes: folder, length, mapping, logging and saving."""
    section = key.partition(".")[0]
    if key in ("run.dir", "run.steps", "sites.meet", "sites.secret", "sites.grace_s", "sites.timeout_s"):
        return True
    return section in ("parallel", "metrics", "faults") or (section == "checkpoint" and key != "checkpoint.init_from")


def _invalidates_finished_run(key: str) -> bool:
    """Return whether changing a key asks for more than the finished run, although it is the same run."""
    return key == "run.steps" or key.startswith("parallel.")


def _describe_change(key: str, settings: Mapping[str, Any], cfg: Config) -> str:
    before = (_flatten(Config()) | dict(settings))[key]
    now = _flatten(cfg)[key]
    return f"{key}={json.dumps(now)} (it has {json.dumps(before)})"


def _found_message(run_dir: Path, folder: Path) -> str:
    return f"run.dir={str(run_dir)!r} holds another run; this run is in {str(folder)!r}"


def _changes_message(settings: Settings | None, cfg: Config) -> str:
    """Return a message with the settings that changed on resume; empty if none did."""
    if settings is None or cfg.checkpoint.resume != "auto" or _newest_intact_checkpoint(cfg) is None:
        return ""
    changed = [
        _describe_change(key, settings, cfg) for key in _changed_keys(settings, cfg) if not _is_free_to_change(key)
    ]
    return f"the run in {cfg.run.dir!r} goes on with other settings: {', '.join(changed)}" if changed else ""


LOCK_FILE = ".lock"
MAX_LOCK_WAIT_S = 100.0
"""A cancelled job may take this long to end; NFS keeps the locks of a lost host for 90 s (its lease)."""
_POLL_INTERVAL_S = 0.2

logger = logging.getLogger(__name__)


_IS_MACOS = sys.platform == "darwin"
_FLOCK = "@qqihh" if _IS_MACOS else "@hhqqi4x"
"""Layout of `struct flock`: start, length, process, type, whence on macOS; type, whence, start, length, process on
Linux."""


def is_in_use(folder: Path) -> bool:
    """Return whether another process holds the lock of a folder; do not call it for a lock that this process holds.

    The lock is only asked about, never taken, so that a job that starts at this moment gets it. Closing the file would
    release every lock of this process on it: fcntl locks belong to the process.
    """
    fields = (
        (0, 0, 0, fcntl.F_WRLCK, os.SEEK_SET) if sys.platform == "darwin" else (fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    )
    try:
        with (folder / LOCK_FILE).open("rb", buffering=0) as file:
            found = struct.unpack(_FLOCK, fcntl.fcntl(file, fcntl.F_GETLK, struct.pack(_FLOCK, *fields)))
    except OSError:
        # There is no lock file, or the file system has no locks.
        return False
    return bool(found[3 if _IS_MACOS else 0] != fcntl.F_UNLCK)


class RunLock:
    """Context manager that locks `folder` for this process; waits up to `wait_s` for another job to end.

    The lock is a process lock (fcntl), so no child inherits it. On a file system without such locks, the folder is used
    unlocked, with a warning. A job that is rejected before it writes anything removes the folders that it created.

    Args:
        folder: folder that only one job at a time may write to; created if needed.
        key: recipe key of the folder, for messages.
        wait_s: how long to wait for the current owner.
    """

    def __init__(self, folder: Path, key: str, wait_s: float) -> None:
        self._folder = folder
        self._key = key
        self._wait_s = wait_s
        self._file: FileIO | None = None
        self._created_folders: list[Path] = []

    def __enter__(self) -> Self:
        """Acquire the lock.

        Raises:
            ConfigError: another process still holds the lock after the wait, or the folder cannot be written.
        """
        path = self._folder / LOCK_FILE
        self._created_folders = [folder for folder in (self._folder, *self._folder.parents) if not folder.exists()]
        self._file = self._open(path)
        deadline_s = time.monotonic() + self._wait_s
        is_first_try = True
        while not self._try_acquire(path):
            if time.monotonic() >= deadline_s:
                owner = self._describe_owner()
                self._file.close()
                raise ConfigError(
                    f"{self._key}={str(self._folder)!r} is in use by another job ({owner}), which did not end within "
                    f"{self._wait_s:g} s; wait for it or end it, or set another {self._key} (if its host is lost for "
                    f"good, remove {str(path)!r})"
                )
            if is_first_try:
                logger.warning("%s=%r is in use (%s): waiting", self._key, str(self._folder), self._describe_owner())
            is_first_try = False
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
        """Release the lock."""
        if self._file is None:
            return
        if (
            kind is not None
            and self._created_folders
            and [entry.name for entry in self._folder.iterdir()] == [LOCK_FILE]
        ):
            (self._folder / LOCK_FILE).unlink()
            # Remove the parents that are still empty.
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
                # The previous owner wrote nothing and removed the folder that it had created, so our file is unlinked.
                self._file.close()
                self._file = self._open(path)
                return False
        except (BlockingIOError, PermissionError):
            return False
        except OSError as error:
            logger.warning(
                "%s cannot be locked (%s): make sure that no other job writes there",
                self._folder / LOCK_FILE,
                error.strerror,
            )
        return True

    def _write_owner(self) -> None:
        assert self._file is not None
        owner = {
            "host": socket.gethostname(),
            "process": os.getpid(),
            "since": f"{datetime.now(UTC):%Y-%m-%d %H:%M:%SZ}",
        }
        if os.fstat(self._file.fileno()).st_size:
            self._file.truncate(0)
        self._file.write(json.dumps(owner).encode() + b"\n")

    def _unwritable_error(self, error: OSError) -> ConfigError:
        return ConfigError(
            f"{self._key}={str(self._folder)!r} cannot be written: {error.strerror}; choose another folder, "
            "or free disk space"
        )

    def _describe_owner(self) -> str:
        """Describe the process that holds the lock, if it has written its name."""
        assert self._file is not None
        self._file.seek(0)
        try:
            owner = json.loads(self._file.read())
            return f"process {owner['process']} on {owner['host']}, since {owner['since']}"
        except (ValueError, KeyError, TypeError):
            return "owner unknown"
