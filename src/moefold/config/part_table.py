"""Build a part from outside from its table in a recipe, `{kind = "gated", num_heads = 8}`.

pydantic validates the values, strictly and with the bounds in the annotations. Its errors become `Problem`s.
"""

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, get_type_hints

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PydanticUserError, ValidationError, create_model
from pydantic.errors import PydanticSchemaGenerationError

from moefold.config.base.field import Bound, MaxMagnitude
from moefold.config.base.limits import MAX_NUMBER, is_oversized, value_unsupported_reason
from moefold.config.base.part import KindOf, Part, Table, default_of_field, required_settings, settings_of, tables_of
from moefold.config.base.part_registry import (
    built_in_kinds,
    check_class,
    check_not_shadowed,
    find_group,
    find_part,
    is_built_in,
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
    raise_missing,
    split_file_kind,
)
from moefold.config.suggestions import (
    annotation_at,
    closest_match,
    group_at,
    join_with_or,
    kind_settings,
    list_advice,
    owners_of,
    part_class_problem,
    wrong_kind,
)
from moefold.errors import ConfigError, raise_all
from moefold.message_text import Problem, Setting, UnquotedText, first_line
from moefold.terminal import printable

logger = logging.getLogger(__name__)

_PREFIX = "of_"
NONE = "none"
"""Value of a key whose optional table is absent."""
SOURCE = "from"
"""Key of a recorded table with the distribution or file of the part. No field can have this name."""


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


def is_table_value(name: str, value: Any) -> bool:
    """Return whether the value of a key of `tables` is a table, or the kind of a part from outside.

    Args:
        value: its value, unchecked.

    Raises:
        ConfigError: a built-in kind and a kind of an installed package have this name.
    """
    group = group_at(name)
    if group is None or not isinstance(value, str):
        return group is None or isinstance(value, dict)
    if value in built_in_kinds(group):
        check_not_shadowed(group, value)
        return False
    return value in entry_points_of(group) or split_file_kind(value) is not None


def build_table(name: str, value: Any, default: Any) -> Any:
    """Build the part or the table of a key.

    Args:
        value: a kind, or a table with `kind` and settings; the settings of a table without kinds; "none": no table.
        default: the default of the key, whose kind a table without `kind` has; None if there is no default.

    Raises:
        MissingPartError: the part was recorded, and its file is not named or its package not installed.
        ConfigError: the kind is unknown or broken, or a setting is wrong (one line for each).
    """
    if default is None and value in (None, NONE):
        return None
    if isinstance(value, Part | Table):
        return value
    annotation = annotation_at(name)
    assert annotation is not None
    if not isinstance(value, dict) and not (isinstance(annotation, KindOf) and isinstance(value, str)):
        expected = "a table" if default is not None else 'a table, or "none"'
        keys = dict.fromkeys(setting for owner in owners_of(annotation) for setting in settings_of(owner))
        needed = [key for owner in owners_of(annotation) for key in required_settings(owner)]
        hint = f"; did you mean {name}.{needed[0]}={value}?" if isinstance(value, str) and len(needed) == 1 else ""
        raise ConfigError(brief_problem(name, value, f"must be {expected}", f"its keys are {', '.join(keys)}{hint}"))
    if isinstance(annotation, KindOf):
        kind = default.kind if isinstance(default, Part) else default
        kind = kind or next(filter(annotation.takes, built_in_kinds(annotation.group)))
        table = {"kind": kind, **value} if isinstance(value, dict) else {"kind": value}
        kind = table["kind"]
        is_own = isinstance(kind, str) and SOURCE not in table and split_file_kind(kind) is None
        if is_own and not annotation.takes(kind):
            raise ConfigError(wrong_kind(name, kind))
        return build_part(name, table)
    assert isinstance(value, dict)
    if is_oversized(value):
        raise ConfigError(Problem(name, None, "has a table that is nested too deep, or a number that is too large"))
    return annotation(**checked_settings(name, "", annotation, value))


def build_part(name: str, value: str | Mapping[str, Any]) -> Part:
    """Build a part.

    Args:
        value: the kind, or a table with `kind` and the settings of the part.

    Raises:
        MissingPartError: the part was recorded, and its file is not named or its package not installed.
        ConfigError: the kind is unknown or broken, or a setting is wrong (one line for each).
    """
    table = {"kind": value} if isinstance(value, str) else dict(value)
    if is_oversized(table):
        raise ConfigError(Problem(name, None, "has a table that is nested too deep, or a number that is too large"))
    annotation = annotation_at(name)
    assert isinstance(annotation, KindOf)
    group = annotation.group
    kind = table.pop("kind")
    if not isinstance(kind, str):
        way_out = f"write {kinds_text(group)}, or FILE.py:CLASS"
        raise ConfigError(Problem(f"{name}.kind", None, f"must be a text, and is {kind!r}", way_out))
    recorded = _read_origin(name, table.pop(SOURCE, {}))
    part, origin = _class_of(name, annotation, kind, recorded)
    _report_difference(name, kind, recorded, origin)
    values = checked_settings(name, kind, part, table)
    try:
        built = part(**values)
        hash(built)
    except Exception as error:
        rule = f"of {origin} refuses its settings: {type(error).__name__}: {printable(error)}"
        raise ConfigError(Problem(name, kind, rule)) from error
    assert isinstance(built, Part)
    return built


def settings_of_other_kind(
    name: str, table: Mapping[str, Any], kind: str, source: Any = None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split the settings of a table into the settings that another kind also has, and the others.

    Args:
        table: a table with `kind`, unchecked.
        kind: the other kind. An unknown kind is refused later.
        source: source of the other kind from its recorded table; None: a user wrote the kind.

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


def toml_value(value: Any) -> str:
    """Return a value in TOML: strings, numbers, booleans and lists are written as in JSON."""
    match value:
        case Part() | Table():
            return toml_value(minimal_form(value))
        case None:
            return toml_value(NONE)
        case dict():
            return toml_table(value)
        case tuple():
            return json.dumps(list(value), default=str, ensure_ascii=False)
        case _:
            return json.dumps(value, default=str, ensure_ascii=False)


def minimal_form(value: Any, base: Any = None) -> Any:
    """Return a part or a table in its shortest form in a recipe: without defaults, a part without settings as its kind.

    A part from outside keeps all its keys, because another version may change the defaults.

    Args:
        value: a value of a key.
        base: the value of an omitted key, such as from a preset; None: the default.
    """
    owner: Any = type(value)
    if isinstance(value, Part) and not is_built_in(owner):
        return _named_by_file(value.as_table())
    if not isinstance(value, Part | Table):
        return NONE if value is None else value
    table = {}
    for key in settings_of(owner):
        before = getattr(base, key, default_of_field(owner, key))
        if (entry := getattr(value, key)) != before:
            table[key] = minimal_form(entry, before)
    if isinstance(value, Table):
        return table
    return {"kind": value.kind, **table} if table else value.kind


def toml_table(table: Mapping[str, Any]) -> str:
    """Return the table of a part in TOML. The kind of a part from a file is its path, if that is recorded."""
    entries = ", ".join(f"{key} = {toml_value(value)}" for key, value in _named_by_file(table).items())
    return f"{{ {entries} }}" if entries else "{}"


def _named_by_file(table: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a part. Its kind is the path and class of its file, if these are recorded."""
    keys = {key: value for key, value in table.items() if key != SOURCE}
    if file := table.get(SOURCE, {}).get("file"):
        keys["kind"] = f"{file}:{keys['kind'].rpartition(':')[2]}"
    return keys


def shown_value(value: Any) -> str:
    """Return a value as text for messages: TOML with strings in single quotes."""
    match value:
        case bool():
            return str(value).lower()
        case list() | tuple():
            return f"[{', '.join(map(shown_value, value))}]"
        case Part():
            return repr(value.kind)
        case Table():
            return toml_value(value)
        case None:
            return repr(NONE)
        case _:
            return repr(value)


def brief_value(value: Any) -> str:
    """Return a value as text for messages, truncated to 60 characters."""
    if is_oversized(value):
        return f"({value.bit_length()} bits)" if isinstance(value, int) else "(a list or table)"
    text = shown_value(value) if isinstance(value, str | int | float | list | dict) else str(value)
    return text if len(text) <= 60 else text[:57] + "..."


def brief_problem(name: str, value: Any, rule: str, way_out: str = "") -> Problem:
    """Return the problem of an unchecked value, whose message has its `brief_value`."""
    text = brief_value(value)
    is_plain = not is_oversized(value) and str(Setting(name, value)).endswith(f"={text}")
    return Problem(name, value if is_plain else UnquotedText(text), rule, way_out)


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
    """Log that a part differs from the recorded one; raise ConfigError if it comes from another distribution."""
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


def checked_settings(name: str, kind: str, part: Any, table: Mapping[str, Any]) -> dict[str, Any]:
    """Return the validated settings of a table, each with the type of its field."""
    problems: dict[str, Problem | ConfigError] = {}
    values: dict[str, Any] = {}
    hints = _hints(part)
    for key, value in table.items():
        if key not in hints:
            guess = closest_match(key, hints)
            owners = kind_settings().get(f"{name}.{key}", ())
            way_out = f"did you mean {name}.{guess}?" if guess else ""
            way_out = f"it is a key of {join_with_or(list(map(repr, owners)))}" if owners else way_out
            keys = f"whose keys are {', '.join(hints)}" if hints else "which has none"
            problems[key] = Problem(
                f"{name}.{key}", None, f"is not a key of {repr(kind) if kind else name}, {keys}", way_out
            )
        elif key in tables_of(part):
            try:
                values[key] = build_table(f"{name}.{key}", value, default_of_field(part, key))
            except ConfigError as error:
                problems[key] = error
        elif reason := value_unsupported_reason(hints[key], MAX_NUMBER, value):
            problems[key] = Problem(f"{name}.{key}", value, reason)
    legal = {key: value for key, value in table.items() if key not in problems and key not in values}
    try:
        model = _pydantic_model(part).model_validate_json(
            json.dumps(legal, default=lambda value: {"no setting": str(value)})
        )
        values |= {name.removeprefix(_PREFIX): getattr(model, name) for name in model.model_fields_set}
    except ValidationError as error:
        for item in error.errors(include_url=False):
            key = str(item["loc"][0])
            problems.setdefault(key, _problem(name, part, key, table.get(key), item["type"], item["msg"]))
    raise_missing(problems.values())
    raise_all(problems.values())
    return values


def _problem(name: str, part: Any, key: str, value: Any, kind: str, message: str) -> Problem:
    if kind == "missing":
        return Problem(f"{name}.{key}", None, "is missing, and has no default", f"write {name}.{key}=VALUE")
    choices = getattr(_hints(part)[key], "__args__", ())
    guess = (
        closest_match(value, [word for word in choices if isinstance(word, str)]) if isinstance(value, str) else None
    )
    rule = message.replace("Input should ", "must ", 1).removeprefix("Value error, ")
    if kind in ("list_type", "tuple_type"):
        is_text = "str" in str(_hints(part)[key])
        advice = list_advice(f"{name}.{key}", value) if is_text else ""
        return Problem(f"{name}.{key}", value, "must be a list", advice)
    return Problem(f"{name}.{key}", value, rule, f"did you mean {guess!r}?" if guess else "")


@cache
def _hints(part: Any) -> dict[str, Any]:
    """Return the type of each setting of a part, with the metadata of its annotation."""
    try:
        hints = get_type_hints(part, include_extras=True)
    except (NameError, TypeError) as error:
        kind, origin = origin_of(part)
        raise ConfigError(f"part {kind!r} of {origin} has an annotation that cannot be read: {error}") from error
    return {name: hints[name] for name in settings_of(part)}


@cache
def _pydantic_model(part: Any) -> type[BaseModel]:
    """Return the pydantic model that validates the settings of a part. A field without a default is required."""
    kind, origin = ("", None) if issubclass(part, Table) else origin_of(part)
    keys: dict[str, Any] = {}
    bases = (base for base in part.__mro__[1:] if base.__module__.startswith("moefold.") and is_dataclass(base))
    base_fields = {field.name for base in bases for field in fields(base)}
    for key, hint in _hints(part).items():
        if key in tables_of(part):
            if not (issubclass(part, Table) or is_built_in(part) or key in base_fields):
                raise ConfigError(f"part {kind!r} of {origin}: KindOf is for built-in kinds; {key} has one")
            continue
        checked = Annotated[hint, AfterValidator(_bounds_of(hint))]  # type: ignore[valid-type]
        # A setting may have the name of a method of pydantic's models.
        keys[f"{_PREFIX}{key}"] = (checked, Field(... if key in required_settings(part) else None, alias=key))
    strict = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)
    try:
        return create_model(f"settings of {kind!r}", __config__=strict, **keys)
    except (PydanticSchemaGenerationError, PydanticUserError) as error:
        raise ConfigError(
            f"part {kind!r} of {origin} has a field whose type no recipe can write: {first_line(error)}"
        ) from error


def _bounds_of(hint: Any) -> Callable[[Any], Any]:
    """Return a function that checks the bounds of `config/field.py` in the annotation of a field."""
    entries = getattr(hint, "__metadata__", ())

    def check(value: Any) -> Any:
        for entry in entries:
            if isinstance(entry, Bound) and not entry.is_legal(value):
                raise ValueError(entry.rule)
            if isinstance(entry, MaxMagnitude) and abs(value) > entry.value:
                raise ValueError(f"must be at most {entry.value}")
        return value

    return check
