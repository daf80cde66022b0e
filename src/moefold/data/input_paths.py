"""The files that a recipe's paths stand for, and an answer that helps where there is none."""

import difflib
import os
from collections.abc import Iterator
from pathlib import Path

from moefold.config.suggestions import HubKind, download_advice
from moefold.errors import ConfigError

MIN_SIMILARITY = 0.75
"""A name is suggested if it is at least so similar to the one that is missing, from 0 to 1."""
_HUB_KIND_BY_KEY: dict[str, HubKind] = {
    "data.path": "dataset",
    "INPUT": "dataset",
    "MODEL": "model",
    "data.tokenizer": "model",
    "--tokenizer": "model",
}
"""What a key may name on the Hugging Face hub, in the minds of users."""


def data_paths(path: str | tuple[str, ...], kind: str) -> tuple[Path, ...]:
    """The existing files and folders that data.path names, absolute, in the recipe's order.

    Raises:
        ConfigError: none is named, one does not exist, or one is named twice.
    """
    names = (path,) if isinstance(path, str) else path
    names = tuple(name for name in names if name)
    if not names:
        raise ConfigError(
            f'data.path is empty, but data.kind="{kind}" reads from it; name a file, a folder or a list of them'
        )
    paths = tuple(existing_path("data.path", name) for name in names)
    check_no_duplicates(paths)
    return paths


def existing_path(key: str, name: str) -> Path:
    """The absolute path of a file or folder that the recipe names under `key`; `~` is the home folder.

    Raises:
        ConfigError: it does not exist; the message has the most similar name in the nearest folder that does.
    """
    try:
        path = Path(name).expanduser().absolute()
        if path.exists():
            return path.resolve()
        missing = path
        while not missing.parent.exists():
            missing = missing.parent
        folder = missing.parent
        if not folder.is_dir():
            raise ConfigError(f"{key}={name!r} does not exist: {folder} is a file, not a folder")
        similar = difflib.get_close_matches(
            missing.name, _candidate_names(folder, missing.name), n=1, cutoff=MIN_SIMILARITY
        )
    except (OSError, RuntimeError) as error:
        raise ConfigError(f"{key}={name!r} cannot be reached ({error}); name a readable file or folder") from error
    advice = download_advice(name, _HUB_KIND_BY_KEY[key], bare="tokenizer" in key) if key in _HUB_KIND_BY_KEY else ""
    otherwise = advice or f"{folder} holds no similar name"
    hint = f"did you mean {str(folder / similar[0])!r}?" if similar else otherwise
    raise ConfigError(f"{key}={name!r} does not exist; {hint}")


def _candidate_names(folder: Path, missing: str) -> list[str]:
    """The names in a folder; hidden ones only where a hidden one was named."""
    return sorted(name for name in os.listdir(folder) if not name.startswith(".") or missing.startswith("."))


def files_below(path: Path, *, skipped_folders: frozenset[str] = frozenset()) -> Iterator[Path]:
    """The file itself, or all files of a folder, recursively: each folder's files by name, then its folders by name.

    Hidden files and folders (a leading dot) and `skipped_folders` are left out, and links to folders are not followed.
    Lazy, so that a first look at a big folder is cheap.

    Raises:
        ConfigError: a folder is not readable.
    """
    if not path.is_dir():
        yield path
        return
    for folder, folders, files in os.walk(path, onerror=_raise_unreadable):
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name not in skipped_folders)
        for name in sorted(files):
            file = Path(folder, name)
            if not name.startswith(".") and file.is_file():
                yield file


def check_no_duplicates(paths: tuple[Path, ...]) -> None:
    """Raise ConfigError if a file comes twice: its copies would be in training and validation."""
    seen: set[Path] = set()
    for path in paths:
        if path in seen:
            raise ConfigError(f"data.path reaches {path} twice; name every file once, alone or by its folder")
        seen.add(path)


def _raise_unreadable(error: OSError) -> None:
    raise ConfigError(f"data.path: {error.filename} is not readable ({error.strerror}); give read access") from error
