"""Names in records that no definition has."""

from collections.abc import Iterator, Mapping
from typing import Any

from moefold.metrics.definitions import GROUPS


def undefined(record: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Return the names in a record that no definition has, as paths with dots.

    Args:
        record: a record of metrics.jsonl, or of a group.
        prefix: path of the record: the prefix of its group without the dot at its end; empty for metrics.jsonl.
    """
    known = {(group.prefix + one.name) for group in GROUPS for one in group.metrics}
    return [path for path in _paths(record, f"{prefix}." if prefix else "") if not _is_known(path, known)]


def _paths(record: Mapping[str, Any], prefix: str) -> Iterator[str]:
    """Yield the path of each key. Paths of dicts in a list or below a key follow it."""
    for key, value in record.items():
        path = f"{prefix}{key}"
        yield path
        if key in ("loss_terms", "nonfinite", "pass_at", "rewards"):
            continue
        for part in value if isinstance(value, list) else (value,):
            if isinstance(part, Mapping):
                yield from _paths(part, f"{path}.")


def _is_known(path: str, known: set[str]) -> bool:
    """Return whether a path or its parts are defined, by name or by a name with "*" in the place of parts."""
    parts = path.split(".")
    return any(name == path or name.startswith(f"{path}.") for name in known) or any(
        len(names) == len(parts) and all(name in ("*", part) for name, part in zip(names, parts, strict=True))
        for names in (one.split(".") for one in known if "*" in one)
    )
