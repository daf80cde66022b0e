"""Find the data files of a checkpoint under the names that they have now: data is the same if its content is.

A run may be started again with its data at another path, below another mount or on another cluster, and its tokenizer
and chat template too. Files are matched by their fingerprints in the order in which they are read, else by their names
below each path of the recipe. Torch-free.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moefold.data.input_paths import SKIPPED, has_same_content, is_below
from moefold.data.source_listing import CHAT_TEMPLATE_FILE, TOKENIZER_CONFIG_FILE, TOKENIZER_FILE, table_suffix
from moefold.remote_path import is_remote

LOCATION_KEYS = ("path", "tokenizer", "chat_template")
"""Keys of [data] that say where files are; the files count, not their names."""


@dataclass(frozen=True)
class DataFiles:
    """Data files of a recipe, by what they are for."""

    paths: tuple[str, ...]
    """data.path."""
    sources: tuple[tuple[str, ...], ...]
    """Names of the files of each path, in the order in which they are read; none for a data set on the hub."""
    settings: Mapping[str, str]
    """Names of the files of tokenizer and chat template, by role."""
    by_folder: bool
    """Names below a folder have a meaning: they tell the splits and the formats apart (huggingface)."""


def data_files(order: Mapping[str, Any], names: Iterable[str]) -> DataFiles:
    """Sort the names of data files by what they are for.

    Args:
        order: data.kind, data.path, data.tokenizer and data.chat_template of the recipe.
        names: names of the files, as `fingerprint` returns them.
    """
    path = order.get("path", "")
    paths = tuple(str(name) for name in (path if isinstance(path, list | tuple) else [path]) if name)
    roles = _roles(order)
    settings: dict[str, str] = {}
    sources: list[list[str]] = [[] for _ in paths]
    current = 0
    for name in names:
        found = next((i for i in range(current, len(paths)) if is_below(Path(name), Path(paths[i]))), None)
        if name in roles and (found is None or not settings.keys() & {roles[name]}):
            settings[roles[name]] = name
        elif found is not None:
            current = found
            sources[found].append(name)
    return DataFiles(paths, tuple(map(tuple, sources)), settings, order.get("kind") == "huggingface")


def _roles(order: Mapping[str, Any]) -> dict[str, str]:
    """Return the roles of the settings files by the names that they may have."""
    tokenizer = str(order.get("tokenizer", "bytes"))
    template = str(order.get("chat_template", ""))
    roles = {}
    if tokenizer not in ("", "bytes"):
        roles = {name: name for name in (TOKENIZER_CONFIG_FILE, CHAT_TEMPLATE_FILE)}
        roles |= {Path(tokenizer).name: TOKENIZER_FILE, TOKENIZER_FILE: TOKENIZER_FILE}
    return roles | ({template: "data.chat_template"} if template else {})


def names_now(
    then: DataFiles, saved: Mapping[str, str], now: DataFiles, fingerprints: Mapping[str, str]
) -> dict[str, str]:
    """Return the names that the files of a checkpoint have now, by their names in it; a file may be gone.

    Args:
        saved: their fingerprints.
    """
    found = {name: now.settings.get(role, name) for role, name in then.settings.items()}
    if len(then.paths) == len(now.paths):
        for i, (before, after) in enumerate(zip(then.sources, now.sources, strict=True)):
            found |= _matched(then, before, saved, now, after, fingerprints) or {
                name: _place_now(name, then, i, now.paths[i]) for name in before
            }
    elif all(then.sources) and all(now.sources):
        before = tuple(name for names in then.sources for name in names)
        after = tuple(name for names in now.sources for name in names)
        found |= _matched(then, before, saved, now, after, fingerprints)
    return found


def _matched(
    then: DataFiles,
    before: Sequence[str],
    saved: Mapping[str, str],
    now: DataFiles,
    after: Sequence[str],
    fingerprints: Mapping[str, str],
) -> dict[str, str]:
    """Return the new names by the old ones if all files have the same content, in the same order; else nothing."""
    if len(before) != len(after):
        return {}
    for one, other in zip(before, after, strict=True):
        same = has_same_content(saved[one], fingerprints[other]) and saved[one] != SKIPPED
        if not same or (then.by_folder and _meaning(then, one) != _meaning(now, other)):
            return {}
    return dict(zip(before, after, strict=True))


def _place_now(name: str, then: DataFiles, index: int, root: str) -> str:
    """Return the name that a file below a path of the checkpoint has below the path of the recipe."""
    relative = _relative(name, then.paths[index])
    if not relative and then.by_folder and table_suffix(Path(name)) != table_suffix(Path(root)):
        return name
    return _joined(root, relative)


def _meaning(files: DataFiles, name: str) -> str:
    """Return the part of a file's name that says how it is read: below a folder all of it, else the suffix."""
    root = next(root for root in files.paths if is_below(Path(name), Path(root)))
    relative = _relative(name, root)
    return relative or table_suffix(Path(name))


def _relative(name: str, root: str) -> str:
    relative = str(Path(name).relative_to(Path(root)))
    return "" if relative == "." else relative


def _joined(root: str, relative: str) -> str:
    if not relative:
        return root
    return f"{root.rstrip('/')}/{relative}" if is_remote(root) else str(Path(root) / relative)


def comparable(then: DataFiles, now: DataFiles, fingerprints: Mapping[str, str]) -> dict[str, str]:
    """Return the fingerprints, without a tokenizer's if the checkpoint, of an old version, has none of a tokenizer."""
    if TOKENIZER_FILE in then.settings:
        return dict(fingerprints)
    unknown = {name for role, name in now.settings.items() if role != "data.chat_template"}
    return {name: seen for name, seen in fingerprints.items() if name not in unknown}


def unmatched_locations(then: DataFiles, now: DataFiles, order: Mapping[str, Any], own: Mapping[str, Any]) -> list[str]:
    """Return the keys of `LOCATION_KEYS` that have no files to compare, and other values.

    Args:
        then: the files of the checkpoint.
        order: settings of the checkpoint.
        own: settings of the recipe.
    """
    wrong = []
    hub_then = [path for path, names in zip(then.paths, then.sources, strict=True) if not names]
    hub_now = [path for path, names in zip(now.paths, now.sources, strict=True) if not names]
    places_then = [i for i, names in enumerate(then.sources) if not names]
    places_now = [i for i, names in enumerate(now.sources) if not names]
    has_other_hub = hub_then != hub_now or (
        bool(hub_now) and (places_then != places_now or len(then.paths) != len(now.paths))
    )
    if order.get("path") != own.get("path") and has_other_hub:
        wrong.append("path")
    for key, role in (("tokenizer", TOKENIZER_FILE), ("chat_template", "data.chat_template")):
        is_compared = role in then.settings and role in now.settings
        if not is_compared and order.get(key) != own.get(key):
            wrong.append(key)
    return wrong
