"""Build a part from outside from its table in a recipe, `{kind = "gated", num_heads = 8}`. Torch-free.

pydantic validates the values, strictly and with the bounds in the annotations; its errors become `Problem`s.
"""

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, get_type_hints

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PydanticUserError, ValidationError, create_model
from pydantic.errors import PydanticSchemaGenerationError

from moefold.config.field import Bound, Most
from moefold.config.find import (
    built_in_kinds,
    check_class,
    check_not_shadowed,
    find_group,
    find_part,
    is_built_in,
    kinds,
    kinds_in_words,
    missing_experiment,
)
from moefold.config.limits import MAX_NUMBER, is_oversized, value_unsupported_reason
from moefold.config.outside import (
    ENTRY_POINTS,
    MissingPartError,
    Origin,
    entry_points_of,
    import_file,
    imported_class,
    origin_of,
    split_file_kind,
)
from moefold.config.part import FlatKey, KindOf, Part, flat_keys, settings_of, without_source
from moefold.config.problem import Problem
from moefold.config.suggestions import (
    closest_match,
    join_with_or,
    key_types,
    kind_settings,
    part_keys,
    part_marks,
    sections,
)
from moefold.errors import ConfigError, raise_all

logger = logging.getLogger(__name__)

_PREFIX = "of_"
SOURCE = "from"
"""Key of a recorded table with the distribution or file of the part; no field can have this name."""


def name_files(tree: Mapping[str, Any], folder: Path = Path()) -> None:
    """Import the files of parts that a user names, `FILE.py:CLASS`, and record their path and sha256, in place.

    Args:
        tree: sections of a recipe, unchecked.
        folder: where relative paths start.

    Raises:
        ConfigError: a file is missing or broken.
    """
    for name in part_keys():
        section, _, key = name.partition(".")
        keys = tree.get(section)
        value = keys.get(key) if isinstance(keys, dict) else None
        kind = value.get("kind") if isinstance(value, dict) else value
        if not isinstance(keys, dict) or not isinstance(kind, str) or split_file_kind(kind) is None:
            continue
        if isinstance(value, dict) and SOURCE in value:
            # Named before: overrides follow the recipe.
            continue
        kind, origin = import_file(kind, folder)
        keys[key] = {**(value if isinstance(value, dict) else {}), "kind": kind, SOURCE: origin.as_dict()}


def is_part_value(name: str, value: Any) -> bool:
    """Return whether the value of a key that chooses a part is one from outside, or a table.

    Args:
        name: recipe key, as "section.key".
        value: its value, unchecked.

    Raises:
        ConfigError: it is the name of a built-in kind, and an installed package has that name too.
    """
    group = part_keys()[name]
    if not isinstance(value, str):
        return isinstance(value, dict)
    if value in built_in_kinds(group):
        check_not_shadowed(group, value)
        return False
    return value in entry_points_of(group) or split_file_kind(value) is not None


def build_part(name: str, value: str | Mapping[str, Any]) -> Part:
    """Build a part from outside.

    Args:
        name: recipe key, as "section.key".
        value: the kind, or a table with `kind` and the settings of the part.

    Raises:
        MissingPartError: the part was recorded, and its file is not named or its package not installed.
        ConfigError: the kind is unknown or broken, or a setting is wrong; one line for each.
    """
    table = {"kind": value} if isinstance(value, str) else dict(value)
    if is_oversized(table):
        raise ConfigError(f"{name} has a table that is nested too deep, or a number that is too large")
    group = part_keys()[name]
    kind = table.pop("kind", None)
    if not isinstance(kind, str):
        what = "has no kind" if kind is None else f"must be a text, and is {kind!r}"
        raise ConfigError(f"{name}.kind {what}; write one of {kinds_in_words(group)}, or FILE.py:CLASS")
    recorded = _read_origin(name, table.pop(SOURCE, {}))
    if kind in built_in_kinds(group) and part_marks()[name].is_flat:
        raise ConfigError(_flat_spelling(name, group, kind, table))
    part, origin = _class_of(name, group, kind, recorded)
    _report_difference(name, kind, recorded, origin)
    values = checked_settings(name, kind, part, table)
    try:
        built = part(**values)
        hash(built)
    except Exception as error:
        raise ConfigError(
            f"{name}={kind!r} of {origin} refuses its settings: {type(error).__name__}: {error}"
        ) from error
    assert isinstance(built, Part)
    return built


def settings_of_other_kind(name: str, table: Mapping[str, Any], kind: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split the settings of a table into those that another kind has too, and those that it lacks.

    Args:
        name: recipe key, as "section.key".
        table: a table with `kind`, unchecked.
        kind: the other kind; the errors of one that is unknown follow.

    Raises:
        ConfigError: the package or file of the other kind is broken.
    """
    settings = {key: value for key, value in table.items() if key not in ("kind", SOURCE)}
    if split_file_kind(kind) is not None:
        part, _ = imported_class(*import_file(kind))
    elif kind in kinds(part_keys()[name]):
        part = find_part(part_keys()[name], kind)
    else:
        return {}, {}
    known = _hints(part)
    kept = {key: value for key, value in settings.items() if key in known}
    return kept, {key: value for key, value in settings.items() if key not in known}


def toml_value(value: Any) -> str:
    """Return a value as a file has it: strings, numbers, truth values and lists are written as in JSON."""
    match value:
        case Part():
            return toml_value(shortest(value)) if is_built_in(type(value)) else toml_table(value.as_table())
        case dict():
            return toml_table(without_source(value))
        case tuple():
            return json.dumps(list(value), default=str, ensure_ascii=False)
        case _:
            return json.dumps(value, default=str, ensure_ascii=False)


def shortest(part: Part) -> str | dict[str, Any]:
    """Return a part as a person writes it in a recipe: without defaults, and as a word if nothing else is left.

    A part from outside keeps all its keys, whose defaults another version may change.
    """
    table = part.as_table()
    if not is_built_in(type(part)):
        return table
    defaults = {field.name: field.default for field in fields(part)}
    table = {key: value for key, value in table.items() if key == "kind" or value != defaults[key]}
    return table if len(table) > 1 else part.kind


def toml_table(table: Mapping[str, Any]) -> str:
    """Return the table of a part as a recipe writes it; a part of a file is named by the path, where it is recorded."""
    keys = without_source(table)
    if file := table.get(SOURCE, {}).get("file"):
        keys["kind"] = f"{file}:{keys['kind'].rpartition(':')[2]}"
    return f"{{ {', '.join(f'{key} = {toml_value(value)}' for key, value in keys.items() if value is not None)} }}"


def shown_value(value: Any) -> str:
    """Return a value as a message shows it: as in TOML, with strings in single quotes."""
    match value:
        case bool():
            return str(value).lower()
        case list() | tuple():
            return f"[{', '.join(map(shown_value, value))}]"
        case Part():
            return repr(value.kind)
        case _:
            return repr(value)


def _read_origin(name: str, recorded: Any) -> Origin:
    is_right = isinstance(recorded, dict) and set(recorded) <= set(Origin._fields)
    if not is_right or not all(isinstance(value, str) for value in recorded.values()):
        raise ConfigError(f"{name}.{SOURCE}={recorded!r} must be a table of {', '.join(Origin._fields)}; leave it out")
    return Origin(**recorded)


def _flat_spelling(name: str, group: str, kind: str, table: Mapping[str, Any]) -> str:
    """Return the refusal of a table of a built-in kind, with the flat keys that it stands for."""
    flat = {field: key.key if isinstance(key, type) else key for field, key in flat_keys(group, kind)}
    words = [f"{name}={kind}", *(f"{flat[key]}={toml_value(value)}" for key, value in table.items() if key in flat)]
    strange = [key for key in table if key not in flat]
    more = f"; {name}.{strange[0]} is no key of {kind!r}" if strange else ""
    return f"{name} is a table, and {kind!r} is a built-in kind, whose keys are flat; write {' '.join(words)}{more}"


def _class_of(name: str, group: str, kind: str, recorded: Origin) -> tuple[Any, Origin]:
    """Return the class of a kind from outside, and where it was found."""
    base = find_group(group)
    if kind in (part_marks()[name].words or built_in_kinds(group)):
        check_not_shadowed(group, kind)
        return find_part(group, kind), Origin()
    if split_file_kind(kind) is not None:
        try:
            part, origin = imported_class(kind, recorded)
        except MissingPartError as error:
            raise MissingPartError(f"{name} {error}") from None
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
        raise ConfigError(f"{name}.kind={kind!r} must be one of {kinds_in_words(group)}, or FILE.py:CLASS{hint}")
    part = find_part(group, kind)
    return part, origin_of(part)[1]


def _report_difference(name: str, kind: str, recorded: Origin, found: Origin) -> None:
    """Say that a part is not the recorded one.

    Raises:
        ConfigError: another distribution has a kind of this name.
    """
    if recorded.distribution != found.distribution and recorded.distribution:
        raise ConfigError(
            f"{name}={kind!r} is a part of {recorded}, and the one that is installed is of {found}; install the first, "
            "or leave the second out"
        )
    if recorded.sha256 and recorded.sha256 != found.sha256:
        logger.warning(
            "moefold: %s=%r is recorded with sha256 %s, and %s has %s: the file has changed since",
            *(name, kind, recorded.sha256[:12], found.file, found.sha256[:12]),
        )
    elif recorded.version != found.version and recorded.version:
        logger.warning("moefold: %s=%r is recorded from %s, and %s is installed", name, kind, recorded, found)


def checked_settings(name: str, kind: str, part: Any, table: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a table, validated, each of the type of its field."""
    problems: dict[str, Problem] = {}
    hints = _hints(part)
    for key, value in table.items():
        if key not in hints:
            guess = closest_match(key, hints)
            owners = kind_settings().get(f"{name}.{key}", ())
            way_out = f"did you mean {name}.{guess}?" if guess else ""
            way_out = f"it is a key of {join_with_or(list(map(repr, owners)))}" if owners else way_out
            keys = f"whose keys are {', '.join(hints)}" if hints else "which has none"
            problems[key] = Problem(f"{name}.{key}", None, f"is not a key of {kind!r}, {keys}", way_out)
        elif reason := value_unsupported_reason(hints[key], MAX_NUMBER, value):
            problems[key] = Problem(f"{name}.{key}", value, reason)
    known = {key: value for key, value in table.items() if key not in problems}
    values: dict[str, Any] = {}
    try:
        found = _model(part).model_validate_json(json.dumps(known, default=lambda value: {"no setting": str(value)}))
        values = {name.removeprefix(_PREFIX): getattr(found, name) for name in found.model_fields_set}
    except ValidationError as error:
        for item in error.errors(include_url=False):
            key = str(item["loc"][0])
            problems.setdefault(key, _problem(name, part, key, table.get(key), item["type"], item["msg"]))
    raise_all(map(str, problems.values()))
    return values


def _problem(name: str, part: Any, key: str, value: Any, kind: str, message: str) -> Problem:
    if kind == "missing":
        return Problem(f"{name}.{key}", None, "is missing, and has no default", f"write {name}.{key}=VALUE")
    choices = getattr(_hints(part)[key], "__args__", ())
    guess = closest_match(value, [one for one in choices if isinstance(one, str)]) if isinstance(value, str) else None
    rule = message.replace("Input should ", "must ", 1).removeprefix("Value error, ")
    return Problem(f"{name}.{key}", value, rule, f"did you mean {guess!r}?" if guess else "")


@cache
def _hints(part: Any) -> dict[str, Any]:
    """Return the type of each setting of a part, with what its annotation says more."""
    try:
        hints = get_type_hints(part, include_extras=True)
    except (NameError, TypeError) as error:
        kind, origin = origin_of(part)
        raise ConfigError(f"part {kind!r} of {origin} has an annotation that cannot be read: {error}") from error
    return {name: hints[name] for name in settings_of(part)}


def _unknown_key(name: str) -> str:
    """Return why a name is no recipe key, with the nearest one; empty if it is one."""
    known = [f"{section}.{key}" for section in sections() for key in key_types(section)]
    if name in known:
        return ""
    guess = closest_match(name, known)
    return "is no recipe key" + (f"; did you mean {guess!r}?" if guess else "")


@cache
def _model(part: Any) -> type[BaseModel]:
    """Return the validator of the settings of a part; a field without a default is required."""
    kind, origin = origin_of(part)
    required = {field.name for field in fields(part) if field.default is MISSING and field.default_factory is MISSING}
    keys: dict[str, Any] = {}
    bases = (base for base in part.__mro__[1:] if base.__module__.startswith("moefold.") and is_dataclass(base))
    of_base = {field.name for base in bases for field in fields(base)}
    for key, hint in _hints(part).items():
        marks = [entry for entry in getattr(hint, "__metadata__", ()) if isinstance(entry, FlatKey | KindOf)]
        for mark in marks:
            if isinstance(mark, FlatKey) and (fault := _unknown_key(mark.name)):
                raise ConfigError(f"part {kind!r} of {origin}: FlatKey({mark.name!r}) of {key} {fault}")
        if marks and key not in of_base:
            raise ConfigError(f"part {kind!r} of {origin}: FlatKey and KindOf are for built-in kinds; {key} has one")
        checked = Annotated[hint, AfterValidator(_bounds_of(hint))]  # type: ignore[valid-type]
        # The name of a setting may be one of a method of pydantic's models.
        keys[f"{_PREFIX}{key}"] = (checked, Field(... if key in required else None, alias=key))
    strict = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)
    try:
        return create_model(f"settings of {kind!r}", __config__=strict, **keys)
    except (PydanticSchemaGenerationError, PydanticUserError) as error:
        first = str(error).splitlines()[0]
        raise ConfigError(f"part {kind!r} of {origin} has a field whose type no recipe can write: {first}") from error


def _bounds_of(hint: Any) -> Callable[[Any], Any]:
    """Return a function that checks the bounds of `config/field.py` in the annotation of a field."""
    entries = getattr(hint, "__metadata__", ())

    def check(value: Any) -> Any:
        for entry in entries:
            if isinstance(entry, Bound) and not entry.is_legal(value):
                raise ValueError(entry.rule)
            if isinstance(entry, Most) and abs(value) > entry.value:
                raise ValueError(f"must be at most {entry.value}")
        return value

    return check
