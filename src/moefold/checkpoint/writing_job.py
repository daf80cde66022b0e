"""Identity of the job that writes a folder of checkpoints, recorded in each: no job replaces another's checkpoints.

The lock of the folder keeps a second job out. The recorded names protect folders without a lock: in an object store, on
a file system without locks, or after a user removed the lock of a lost host. In a local folder each job also writes to
its own folder, which becomes the checkpoint by a rename that replaces nothing. So a job that is suspended in a save and
continues later cannot write into the checkpoint of another job.
"""

import json
import re
import uuid
from dataclasses import dataclass
from pathlib import Path

from moefold.bounded_read import MAX_DESCRIPTION_BYTES, read_json
from moefold.checkpoint.find_checkpoint import (
    named_checkpoints,
    remote_step_folders,
    step_of,
    step_path,
    unfinished_checkpoints,
)
from moefold.checkpoint.manifest import MANIFEST_FILE, regular_file
from moefold.checkpoint.retention import remove_checkpoint, remove_folder
from moefold.errors import ConfigError
from moefold.host.folder_lock import Owner
from moefold.remote_path import RemotePath

WRITER_FILE = ".writer.json"
"""File with the name of the job in a checkpoint. It is hidden, so no upload contains the name of a host."""
_DRAFT_PATTERN = re.compile(r"\.step-(\d+)\..*")


def tmp_checkpoint_path(folder: Path, step: int, job: str) -> Path:
    """Return the path where a job writes a checkpoint before `commit`. In a remote folder it is the final path.

    Two jobs never write into one folder, because a job that is suspended in a save may continue at any time.
    """
    if isinstance(folder, RemotePath):
        return step_path(folder, step)
    return folder / f".step-{step:06d}.{job}.partial"


def commit(tmp: Path, final: Path) -> None:
    """Rename a finished temporary folder to its final name, and remove an existing checkpoint of that name.

    Raises:
        OSError: another job gave that name to its own checkpoint at this moment. That checkpoint stays.
    """
    if final.exists():
        remove_checkpoint(final)
    tmp.rename(final)


@dataclass(frozen=True)
class _WriterMark:
    """Content of `WRITER_FILE`."""

    job: str
    owner: Owner


class WritingJob:
    """Identity of a job that saves into a folder of checkpoints, used on its first rank.

    The job replaces and removes only checkpoints that it wrote or that it found at its start. An unfinished checkpoint
    must also have no running process on this machine and must not change, because its job may run elsewhere.

    Args:
        folder: the folder of checkpoints. It need not exist.
    """

    def __init__(self, folder: Path, key: str) -> None:
        self._folder = folder
        self._key = key
        self._job = uuid.uuid4().hex
        self._owner = Owner.current()
        self._initial = {path.name: _change_stamp(path) for path in (*_step_folders(folder), *_drafts(folder))}
        self._written: set[str] = set()

    def create_draft(self, step: int) -> Path:
        """Create an empty folder for the checkpoint of a step. Delete what killed jobs left of that step.

        Raises:
            ConfigError: another job saves into the folder of checkpoints.
            OSError: the folder cannot be created.
        """
        self.check(step_path(self._folder, step))
        newest = max((step_of(Path(name)) for name in self._written), default=-1)
        for path in _drafts(self._folder):
            mark = _read_mark(path)
            # A slower job is refused at the end of its save.
            if mark is not None and not self.may_replace(path) and _step_of_draft(path) > newest:
                raise self.other_job_error(path)
            if _step_of_draft(path) == step and self.may_replace(path):
                remove_folder(path)
        draft = tmp_checkpoint_path(self._folder, step, self._job)
        if isinstance(draft, RemotePath):
            remove_checkpoint(draft)
            draft.mkdir(parents=True, exist_ok=True)
        else:
            draft.mkdir(parents=True)
        self.mark(draft)
        return draft

    def check(self, final: Path) -> None:
        """Check that no other job saved into the folder since this job started, and that `final` may be replaced.

        Raises:
            ConfigError: another job wrote a checkpoint, or in a remote folder a part of a checkpoint.
        """
        for path in _step_folders(self._folder):
            if path.name in self._initial or path.name in self._written:
                continue
            mark = _read_mark(path)
            if mark is not None and mark.job != self._job:
                raise self.other_job_error(path)
        if final.exists() and not self.may_replace(final):
            raise self.other_job_error(final)

    def mark(self, draft: Path) -> None:
        """Write the name of this job into a new folder, before anything else."""
        text = json.dumps({"job": self._job, "owner": self._owner.to_json()})
        (draft / WRITER_FILE).write_text(text, encoding="utf-8")

    def check_still_own(self, draft: Path) -> None:
        """Check that a folder that this job writes is still its own. Delete what it wrote after a removal.

        Raises:
            ConfigError: another job replaced the folder, or it was removed.
        """
        mark = _read_mark(draft)
        if mark is None:
            if not isinstance(draft, RemotePath):
                remove_folder(draft)
            raise ConfigError(
                f"{str(draft)!r} was removed while it was written, by hand or by another job that saves into "
                f"{self._key}={str(self._folder)!r}: nothing is saved; make sure that one job writes there"
            )
        if mark.job != self._job:
            raise self.other_job_error(draft)

    def record_saved(self, final: Path) -> None:
        """Record that this job has saved a checkpoint."""
        self._written.add(final.name)

    def may_replace(self, path: Path) -> bool:
        """Return whether this job may replace or remove a complete or unfinished checkpoint."""
        mark = _read_mark(path)
        if mark is not None and mark.job == self._job:
            return True
        if mark is not None and _step_of_draft(path) >= 0 and mark.owner.is_running_here():
            return False
        return path.name in self._initial and _change_stamp(path) == self._initial[path.name]

    def other_job_error(self, path: Path) -> ConfigError:
        """Return the error for a checkpoint that another job wrote, even partly."""
        mark = _read_mark(path)
        owner = "" if mark is None else f" ({mark.owner})"
        return ConfigError(
            f"{self._key}={str(self._folder)!r} is in use by another job{owner}, which wrote {path.name!r} since this "
            f"one started: nothing of it is replaced, and this run is not saved there; set another {self._key}, or end "
            "one of the jobs"
        )


def _step_folders(folder: Path) -> list[RemotePath] | list[Path]:
    """Return the folders named like a checkpoint, in a remote folder incomplete checkpoints too."""
    return remote_step_folders(folder) if isinstance(folder, RemotePath) else named_checkpoints(folder)


def _drafts(folder: Path) -> list[Path]:
    return [] if isinstance(folder, RemotePath) else unfinished_checkpoints(folder)


def _step_of_draft(path: Path) -> int:
    """Return the step in the name of an unfinished checkpoint of a local folder, -1 for another name."""
    match = _DRAFT_PATTERN.fullmatch(path.name)
    return int(match[1]) if match else -1


def _change_stamp(path: Path) -> tuple[object, ...]:
    """Return a stamp that changes if another job replaces a checkpoint, or continues to write an unfinished one."""
    mark = _read_mark(path)
    job = "" if mark is None else mark.job
    if isinstance(path, RemotePath):
        files = path.files()
        entries = [(name, entry.size_bytes, entry.modified_s) for name, entry in files.items()]
        return (job,) if MANIFEST_FILE in files else (job, *entries)
    if not path.name.startswith("."):
        return (job,)
    try:
        statuses = sorted((file.name, file.lstat()) for file in path.iterdir())
    except FileNotFoundError:
        # Its job is still running: it has just renamed the folder to its final name, or removed it.
        return (job, "gone")
    return (job, *((name, status.st_size, status.st_mtime_ns) for name, status in statuses))


def _read_mark(path: Path) -> _WriterMark | None:
    """Return the job that wrote a checkpoint, or None for checkpoints of earlier versions."""
    try:
        fields = read_json(regular_file(path, WRITER_FILE), MAX_DESCRIPTION_BYTES)
        job, owner = fields["job"], Owner.from_json(fields["owner"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return _WriterMark(job, owner) if isinstance(job, str) and owner is not None else None
