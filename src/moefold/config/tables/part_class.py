"""Find the class of a part by its table in a recipe: of this package, of another distribution, or of a file."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moefold.config.base.part import NONE, SOURCE, KindOf, Part, settings_of
from moefold.config.base.part_registry import (
    built_in_kinds,
    check_class,
    check_not_shadowed,
    find_group,
    find_part,
    kinds,
    kinds_text,
    missing_experiment,
)
from moefold.config.base.plugins import (
    ENTRY_POINTS,
    MissingPartError,
    Origin,
    entry_points_of,
    import_file,
    imported_class,
    origin_of,
    split_file_kind,
)
from moefold.config.keys.paths import annotation_at, group_at
from moefold.config.keys.suggestions import part_class_problem
from moefold.errors import ConfigError
from moefold.message_text import Problem, closest_match

logger = logging.getLogger(__name__)


def import_part_files(tree: Mapping[str, Any], folder: Path = Path()) -> None:
    """Import the files of parts that a user names, `FILE.py:CLASS`, and record their path and sha256, in place.

    Args:
        tree: sections of a recipe, unchecked.
        folder: where relative paths start.

    Raises:
        ConfigError: a file is missing or broken.
    """
    for section, keys in tree.items():
        _import_part_files_in(section, keys, folder)


def _import_part_files_in(path: str, table: Any, folder: Path) -> None:
    for key, value in table.items() if isinstance(table, dict) else ():
        kind = value.get("kind") if isinstance(value, dict) else value
        # A table with a source is done already: overrides are applied after the recipe.
        is_open = isinstance(kind, str) and not (isinstance(value, dict) and SOURCE in value)
        if is_open and split_file_kind(str(kind)) is not None and group_at(f"{path}.{key}"):
            kind, origin = import_file(str(kind), folder)
            table[key] = {**(value if isinstance(value, dict) else {}), "kind": kind, SOURCE: origin.as_dict()}
        if isinstance(value, dict) and annotation_at(f"{path}.{key}") is not None:
            _import_part_files_in(f"{path}.{key}", table[key], folder)


def resolve_kind_path(kind: Any, folder: Path) -> Any:
    """Return a kind FILE.py:CLASS, or a table with such a kind, with its relative path joined to a folder."""
    if isinstance(kind, dict) and "kind" in kind:
        return {**kind, "kind": resolve_kind_path(kind["kind"], folder)}
    is_file = isinstance(kind, str) and split_file_kind(kind) is not None
    return str(folder.absolute() / kind) if is_file else kind


def settings_of_other_kind(
    name: str, table: Mapping[str, Any], kind: str, source: Any = None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split the settings of a table into the settings that another kind also has, and the others.

    Args:
        table: a table with `kind`, unchecked.
        kind: the other kind. An unknown kind is refused later.
        source: source of the other kind from its recorded table, or None if a user wrote the kind.

    Raises:
        MissingPartError: the file of `source` is not named.
        ConfigError: the package or file of the other kind is broken.
    """
    settings = {key: value for key, value in table.items() if key not in ("kind", SOURCE)}
    annotation = annotation_at(name)
    if not isinstance(annotation, KindOf):
        return {}, {}
    if split_file_kind(kind) is not None:
        kind_name, origin = import_file(kind) if source is None else (kind, _read_origin(name, source))
        part, _ = _class_of(name, annotation, kind_name, origin)
    elif kind in kinds(annotation.group):
        part = find_part(annotation.group, kind)
    else:
        return {}, {}
    own_settings = settings_of(part)
    shared = {key: value for key, value in settings.items() if key in own_settings}
    return shared, {key: value for key, value in settings.items() if key not in own_settings}


def without_outside_parts(path: str, table: Mapping[str, Any]) -> dict[str, Any]:
    """Return a table, given its path, without the parts from outside of this package."""
    filtered = {}
    for key, value in table.items():
        group = group_at(f"{path}.{key}")
        kind = value.get("kind") if isinstance(value, dict) else value
        if group is None or not isinstance(kind, str) or kind in (*built_in_kinds(group), NONE):
            filtered[key] = without_outside_parts(f"{path}.{key}", value) if isinstance(value, dict) else value
    return filtered


def recorded_class(name: str, annotation: KindOf, kind: str, source: Any) -> tuple[Any, Origin]:
    """Return the class of a kind and its origin, and log how it differs from the recorded one.

    Args:
        source: the source of the part from its recorded table, unchecked, or {} if none is recorded.

    Raises:
        MissingPartError: the part was recorded, and its file is not named or its package not installed.
        ConfigError: the kind is unknown or broken, or comes from another distribution.
    """
    recorded = _read_origin(name, source)
    part, origin = _class_of(name, annotation, kind, recorded)
    _report_difference(name, kind, recorded, origin)
    return part, origin


def _read_origin(name: str, recorded: Any) -> Origin:
    is_right = isinstance(recorded, dict) and set(recorded) <= set(Origin._fields)
    if not is_right or not all(isinstance(value, str) for value in recorded.values()):
        rule = f"must be a table of {', '.join(Origin._fields)}"
        raise ConfigError(Problem(f"{name}.{SOURCE}", recorded, rule, "leave it out"))
    return Origin(**recorded)


def _class_of(name: str, annotation: KindOf, kind: str, recorded: Origin) -> tuple[Any, Origin]:
    """Return the class of a kind from outside, and its origin."""
    group = annotation.group
    base = find_group(group)
    if kind in built_in_kinds(group) and annotation.takes(kind):
        check_not_shadowed(group, kind)
        return find_part(group, kind), Origin()
    if split_file_kind(kind) is not None:
        try:
            part, origin = imported_class(kind, recorded)
        except MissingPartError as error:
            raise MissingPartError(f"{name} {error}") from None
        if isinstance(part, type) and issubclass(part, Part):
            _check_slot(name, kind, part, origin)
        check_class(part, base, f"{name}={kind!r} of {origin}")
        return part, origin
    if kind not in entry_points_of(group):
        if recorded.distribution:
            raise MissingPartError(
                f"{name}={kind!r} is a part of {recorded}, which is not installed; pip install {recorded.distribution}"
            )
        if ":" in kind:
            raise MissingPartError(
                f"{name}={kind!r} is a part that a program made; declare it as an entry point of the group "
                f"{ENTRY_POINTS}{group}, or name its file, FILE.py:CLASS"
            )
        if missing := missing_experiment(name, group, kind):
            raise MissingPartError(missing)
        guess = closest_match(kind, kinds(group))
        hint = f"; did you mean {guess!r}?" if guess else ""
        raise ConfigError(Problem(f"{name}.kind", kind, f"must be {kinds_text(group)}, or FILE.py:CLASS{hint}"))
    part = find_part(group, kind)
    origin = origin_of(part)[1]
    _check_slot(name, kind, part, origin)
    return part, origin


def _check_slot(name: str, kind: str, part: Any, origin: Origin) -> None:
    if fault := part_class_problem(name, part):
        raise ConfigError(Problem(name, kind, f"of {origin} {fault}"))


def _report_difference(name: str, kind: str, recorded: Origin, now: Origin) -> None:
    """Log that a part differs from the recorded one, and raise ConfigError if it comes from another distribution."""
    if recorded.distribution != now.distribution and recorded.distribution:
        rule = f"is a part of {recorded}, and the one that is installed is of {now}"
        raise ConfigError(Problem(name, kind, rule, "install the first, or leave the second out"))
    if recorded.sha256 and recorded.sha256 != now.sha256:
        logger.warning(
            "moefold: %s=%r is recorded with sha256 %s, and %s has %s: the file has changed since",
            *(name, kind, recorded.sha256[:12], now.file, now.sha256[:12]),
        )
    elif recorded.version != now.version and recorded.version:
        logger.warning("moefold: %s=%r is recorded from %s, and %s is installed", name, kind, recorded, now)
