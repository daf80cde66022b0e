"""Files of a split of a folder, by the rules of the package `datasets`: names, or the configurations of its README.md.

Patterns are compared with the names of files relative to the folder, so that no character of the folder's own name is
part of a pattern.
"""

import logging
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from moefold.bounded_read import MAX_CONFIG_BYTES, MAX_DESCRIPTION_BYTES, read_json, read_text
from moefold.config.suggestions import closest_match
from moefold.data.input_paths import files_below
from moefold.data.source_listing import table_suffix
from moefold.data.table_rows import FOLDER_SUFFIXES, text_rows
from moefold.errors import ConfigError

SAVED_DATASET_FILES = ("state.json", "dataset_dict.json")
METADATA_FILES = (*SAVED_DATASET_FILES, "dataset_info.json", "dataset_infos.json")
_CARD = "README.md"
_FRONT_MATTER = re.compile(r"\A\ufeff?---[ \t]*\n(.*?\n)---[ \t]*(?:\n|\Z)", re.DOTALL)
_CONFIG_KEYS = frozenset({"config_name", "data_files", "data_dir", "default", "description", "version", "features"})
"""Keys of a configuration; others are options of a reader of the package."""
_SHARD = re.compile(r"data/([^/]+)-\d{5}-of-\d{5}[^/]*\.[^/]*")

logger = logging.getLogger(__name__)


def check_rows_readable(file: Path, column: str) -> None:
    """Read all rows of a file.

    Raises:
        ColumnError: it lacks the column, or a row holds no text.
        ConfigError: the file is broken.
    """
    if table_suffix(file) in FOLDER_SUFFIXES and file.name not in METADATA_FILES:
        for _ in text_rows(file, column):
            pass


def is_saved_dataset(path: Path) -> bool:
    """Return whether a folder is a data set that `save_to_disk` wrote."""
    return any((path / name).is_file() for name in SAVED_DATASET_FILES)


def split_files(folder: Path, split: str, subset: str) -> list[Path]:
    """Return the files of a split of a folder, in order.

    Args:
        split: name of the split.
        subset: name of a configuration of its README.md; empty: the default one.

    Raises:
        ConfigError: there is no such split or configuration, or no file of it is a table.
    """
    if is_saved_dataset(folder):
        return _saved_files(folder, split)
    names = sorted(str(file.relative_to(folder)) for file in files_below(folder) if _is_listed(file, folder))
    by_split = _configured_files(folder, names, subset)
    if by_split is None:
        if subset:
            raise ConfigError(f"data.subset={subset!r}: the {_CARD} of {folder} names no configurations; leave it out")
        by_split = _named_splits(names)
    _check_split(split, by_split, folder)
    return [folder / name for name in _of_one_format(by_split[split], folder)]


def _is_listed(file: Path, folder: Path) -> bool:
    """Return whether a file may be data: it describes no data set, and is in no folder such as __MACOSX."""
    inside = file.relative_to(folder).parent.parts
    return file.name not in (*METADATA_FILES, _CARD, "config.json") and not any(
        name.startswith("__") for name in inside
    )


def _check_split(split: str, splits: Mapping[str, Any], folder: Path) -> None:
    if split not in splits:
        guess = closest_match(split, splits)
        hint = f"did you mean {guess!r}?" if guess else f"the splits are {', '.join(sorted(splits)) or 'none'}"
        raise ConfigError(f"data.split={split!r} is not in {folder}; {hint}")


def _saved_files(folder: Path, split: str) -> list[Path]:
    try:
        if (folder / "dataset_dict.json").is_file():
            _check_split(split, {str(name): None for name in _read(folder / "dataset_dict.json")["splits"]}, folder)
            folder = folder / split
        state = _read(folder / "state.json")
        if state.get("_indices_data_files"):
            raise ConfigError(f"{folder} is a selection of rows, saved by an old version of datasets; save it again")
        return [folder / Path(file["filename"]).name for file in state["_data_files"]]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
        raise ConfigError(f"{folder} is no complete saved data set ({reason}); copy it again") from error


def _read(file: Path) -> Any:
    return read_json(file, MAX_DESCRIPTION_BYTES)


def _of_one_format(names: Sequence[str], folder: Path) -> list[str]:
    """Return the files of the format that most of them have."""
    formats = Counter(table_suffix(Path(name)) for name in names)
    tables = [(count, suffix) for suffix, count in formats.items() if suffix in FOLDER_SUFFIXES]
    if not tables:
        found = ", ".join(sorted(suffix or "no suffix" for suffix in formats)) or "none"
        raise ConfigError(f"{folder} has no file in {', '.join(FOLDER_SUFFIXES)} for this split (found: {found})")
    most = max(tables)[0]
    best = [suffix for count, suffix in tables if count == most]
    # A description such as stats.json may stand next to the one file with text.
    best = [suffix for suffix in best if suffix not in (".json", ".txt")] or best
    if len(best) > 1:
        raise ConfigError(
            f"{folder} has as many files in {best[0]} as in {best[1]} for this split; name the files in data.path"
        )
    if left_out := [name for name in names if table_suffix(Path(name)) != best[0]]:
        more = f" and {len(left_out) - 1} more" if len(left_out) > 1 else ""
        logger.warning("data.path: %s is read in %s; left out %s%s", folder, best[0], left_out[0], more)
    return [name for name in names if table_suffix(Path(name)) == best[0]]


def _named_splits(names: Sequence[str]) -> dict[str, list[str]]:
    """Return the files of each split by the rules of `datasets` for folders without configurations."""
    from datasets import data_files

    by_split: dict[str, list[str]] = {}
    for name in names:
        if match := _SHARD.fullmatch(name):
            by_split.setdefault(match[1], []).append(name)
    if by_split:
        return by_split
    for patterns in data_files.ALL_DEFAULT_PATTERNS:
        by_split = {str(split): _matching(names, wanted) for split, wanted in patterns.items()}
        if by_split := {split: found for split, found in by_split.items() if found}:
            return by_split
    return {}


def _matching(names: Sequence[str], patterns: Sequence[str]) -> list[str]:
    """Return the names that match a pattern, names that match the first pattern first."""
    from fsspec.utils import glob_translate

    found: dict[str, None] = {}
    for pattern in patterns:
        # A file that has the very name is meant, whatever characters it has.
        matches = re.compile(glob_translate(pattern)).match
        found |= dict.fromkeys([pattern] if pattern in names else [name for name in names if matches(name)])
    return list(found)


def _configured_files(folder: Path, names: Sequence[str], subset: str) -> dict[str, list[str]] | None:
    """Return the files of each split of a configuration of README.md; None if it has none."""
    configs = _configurations(folder)
    if not configs:
        return None
    by_name = {str(config.get("config_name", "default")): config for config in configs}
    defaults = [name for name, config in by_name.items() if config.get("default") or name == "default"]
    if not subset and len(by_name) == 1:
        defaults = list(by_name)
    wanted = subset or next(iter(defaults), "")
    if wanted not in by_name:
        given = f"data.subset={subset!r} is none of" if subset else "data.subset is empty, and must be one of"
        raise ConfigError(f"{given} the configurations of {folder}: {', '.join(by_name)}")
    config = by_name[wanted]
    if others := sorted(map(str, config.keys() - _CONFIG_KEYS)):
        raise ConfigError(
            f"the {_CARD} of {folder} sets {others[0]!r} for its reader, which has no effect here; name the files in "
            "data.path"
        )
    below = str(config.get("data_dir", "")).removeprefix("./").rstrip("/")
    prefix = f"{below}/" if below else ""
    inner = [name.removeprefix(prefix) for name in names if name.startswith(prefix)]
    by_split = (
        _files_of_patterns(config["data_files"], inner, folder) if "data_files" in config else _named_splits(inner)
    )
    return {split: [prefix + name for name in found] for split, found in by_split.items()}


def _files_of_patterns(patterns: Any, names: Sequence[str], folder: Path) -> dict[str, list[str]]:
    from datasets import data_files

    try:
        wanted = data_files.sanitize_patterns(patterns)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"the {_CARD} of {folder} has data_files that are not understood ({error})") from error
    return {str(split): _matching(names, [str(one).removeprefix("./") for one in few]) for split, few in wanted.items()}


def _configurations(folder: Path) -> list[dict[str, Any]]:
    """Return the configurations that the front matter of README.md lists."""
    try:
        match = _FRONT_MATTER.match(read_text(folder / _CARD, MAX_CONFIG_BYTES))
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        raise ConfigError(f"{folder / _CARD} cannot be read ({error}); fix or remove it") from error
    if match is None:
        return []
    import yaml  # type: ignore[import-untyped]

    try:
        fields = yaml.safe_load(match[1])
    except yaml.YAMLError as error:
        raise ConfigError(f"{folder / _CARD} has no YAML between its lines '---'; fix or remove it") from error
    configs = fields.get("configs", []) if isinstance(fields, dict) else []
    if not isinstance(configs, list) or not all(isinstance(config, dict) for config in configs):
        raise ConfigError(f"{folder / _CARD}: configs must be a list of configurations; fix it")
    return configs
