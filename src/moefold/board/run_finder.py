"""Run folders below the paths that a user names."""

import hashlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from moefold.bounded_read import MAX_CONFIG_BYTES, read_json_object
from moefold.config.sections.run import SETTINGS_FILE
from moefold.errors import ConfigError
from moefold.metrics.reader import METRICS_FILE

MAX_DEPTH = 3
"""Searched levels of folders below a named folder."""
MAX_FOLDERS = 5000
"""Maximum folders that one search opens."""


@dataclass(frozen=True)
class FoundRun:
    """Run folder."""

    path: Path
    name: str
    """Shortest end of the path that is unique among the found runs."""

    @property
    def key(self) -> str:
        """Identifier in URLs, which is not a path."""
        return hashlib.sha256(os.fsencode(self.path)).hexdigest()[:12]


def find_runs(paths: Sequence[Path]) -> list[FoundRun]:
    """Return the run folders among and below some folders, sorted by path.

    A folder that cannot be read, or has no runs yet, adds no runs.
    """
    folders: dict[Path, None] = {}
    for path in paths:
        folders |= dict.fromkeys(sorted(_runs_below(path.resolve())))
    return name_runs(list(folders))


def check_folders(paths: Sequence[Path]) -> None:
    """Check that paths are folders. Raise ConfigError if one is not."""
    for path in paths:
        if not os.path.isdir(path):
            fault = "is not a folder" if os.path.exists(path) else "does not exist"
            raise ConfigError(f"{str(path)!r} {fault}; name the run.dir of a training run, or a folder of run folders")


def name_runs(paths: Sequence[Path]) -> list[FoundRun]:
    """Name run folders by the shortest unique ends of their paths."""
    length = 1
    longest = max((len(path.parts) for path in paths), default=1)
    while length < longest and len({path.parts[-length:] for path in paths}) < len(paths):
        length += 1
    return [FoundRun(path, "/".join(path.parts[-length:])) for path in paths]


def is_run(folder: Path) -> bool:
    """Return whether a folder has readable files of a run. A single config.json must be from moefold."""
    path = folder / SETTINGS_FILE
    try:
        if (folder / METRICS_FILE).is_file():
            return True
        if not path.is_file():
            return False
        tree = read_json_object(path, MAX_CONFIG_BYTES)
    except (OSError, ValueError):
        return False
    return isinstance(tree.get("run"), dict) and isinstance(tree.get("parallel"), dict)


def _runs_below(folder: Path) -> Iterator[Path]:
    """Yield run folders, breadth first. Run folders, hidden folders and links are not searched."""
    level = [folder]
    budget = MAX_FOLDERS
    for depth in range(MAX_DEPTH + 1):
        below: list[Path] = []
        for path in level:
            if budget <= 0:
                return
            budget -= 1
            if is_run(path):
                yield path
            elif depth < MAX_DEPTH:
                below += _subfolders(path)
        level = below


def _subfolders(folder: Path) -> list[Path]:
    try:
        with os.scandir(folder) as entries:
            return sorted(
                Path(entry.path)
                for entry in entries
                if not entry.name.startswith(".") and entry.is_dir(follow_symlinks=False)
            )
    except OSError:
        return []
