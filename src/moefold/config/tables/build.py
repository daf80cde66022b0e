"""Build a part from its table in a recipe, `{kind = "gated", num_heads = 8}`.

pydantic validates the values, strictly and with the bounds in the annotations. Its errors become `Problem`s.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Annotated, Any, get_type_hints

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PydanticUserError, ValidationError, create_model
from pydantic.errors import PydanticSchemaGenerationError

from moefold.config.base.field import Bound, MaxMagnitude
from moefold.config.base.limits import MAX_NUMBER, is_oversized, value_unsupported_reason
from moefold.config.base.part import (
    NONE,
    SOURCE,
    KindOf,
    Part,
    Table,
    default_of_field,
    required_settings,
    settings_of,
    tables_of,
)
from moefold.config.base.part_registry import (
    built_in_kinds,
    check_not_shadowed,
    is_built_in,
    kinds_text,
)
from moefold.config.base.plugins import (
    entry_points_of,
    origin_of,
    raise_missing,
    split_file_kind,
)
from moefold.config.keys.paths import annotation_at, group_at, kind_settings, owners_of
from moefold.config.keys.suggestions import list_advice, wrong_kind
from moefold.config.tables.part_class import recorded_class
from moefold.config.tables.toml_text import brief_problem
from moefold.errors import ConfigError, raise_all
from moefold.message_text import Problem, closest_match, first_line, join_with_or
from moefold.terminal import printable

_PREFIX = "of_"


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
        value: a kind, a table with `kind` and settings, the settings of a table without kinds, or "none" (no table).
        default: the default of the key, whose kind a table without `kind` has, or None if there is no default.

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
    part, origin = recorded_class(name, annotation, kind, table.pop(SOURCE, {}))
    values = checked_settings(name, kind, part, table)
    try:
        built = part(**values)
        hash(built)
    except Exception as error:
        rule = f"of {origin} refuses its settings: {type(error).__name__}: {printable(error)}"
        raise ConfigError(Problem(name, kind, rule)) from error
    assert isinstance(built, Part)
    return built


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
    """Return a function that checks the bounds of `config/base/field.py` in the annotation of a field."""
    entries = getattr(hint, "__metadata__", ())

    def check(value: Any) -> Any:
        for entry in entries:
            if isinstance(entry, Bound) and not entry.is_legal(value):
                raise ValueError(entry.rule)
            if isinstance(entry, MaxMagnitude) and abs(value) > entry.value:
                raise ValueError(f"must be at most {entry.value}")
        return value

    return check
