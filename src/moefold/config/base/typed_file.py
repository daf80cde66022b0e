"""TOML files whose keys are the fields of a dataclass, validated by pydantic from its annotations.

The dataclass and the dataclasses of its fields have `__pydantic_config__ = STRICT`.
"""

import json
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar, cast, get_args, get_type_hints

from pydantic import ConfigDict, TypeAdapter, ValidationError, WrapValidator

from moefold.bounded_read import parse_toml
from moefold.config.base.field import Bound
from moefold.errors import ConfigError
from moefold.message_text import closest_match

STRICT = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)
T = TypeVar("T")


def within(bound: Bound) -> WrapValidator:
    """Return the check of a bound, for the annotation of a number or a dict. Its message also covers other types."""

    def check(value: Any, validate: Callable[[Any], Any]) -> Any:
        try:
            if bound.is_legal(checked := validate(value)):
                return checked
        except ValidationError as error:
            if error.errors()[0]["loc"]:
                raise
        raise ValueError(bound.rule)

    return WrapValidator(check)


def parse_table(text: str, location: str) -> dict[str, Any]:
    """Parse the TOML of a file, or raise ConfigError if it is not TOML."""
    try:
        return parse_toml(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{location}: not TOML: {error}") from None


def from_table(kind: type[T], tree: Mapping[str, Any], location: str, advice: str = "") -> T:
    """Build the dataclass of a file.

    Args:
        tree: keys of the file, unchecked.
        location: the file, for the start of an error.
        advice: text after "give them" for missing keys at the top of the file.

    Raises:
        ConfigError: a key is unknown or missing, or a value is wrong.
    """
    try:
        # As JSON, tables become dataclasses and lists tuples. A date becomes an object that fails every type.
        text = json.dumps(tree, default=lambda date: {"no setting": {"date": str(date)}})
        return cast(T, TypeAdapter(cast(Any, kind)).validate_json(text))
    except ValidationError as error:
        raise ConfigError(f"{location}: {_describe_problem(kind, error, advice)}") from None


def _describe_problem(kind: Any, error: ValidationError, advice: str) -> str:
    """Describe the first fault: an unknown key, missing keys, or a wrong value."""
    faults = {".".join(map(str, item["loc"])): item for item in error.errors(include_url=False)}
    for key, item in faults.items():
        if item["type"] == "unexpected_keyword_argument":
            *path, name = item["loc"]
            guess = closest_match(str(name), legal := _keys_at(kind, path), cutoff=0.5)
            hint = f"did you mean {'.'.join(map(str, [*path, guess]))!r}?"
            return f"unknown key {key!r}; " + (hint if guess else f"the keys are {', '.join(legal)}")
    if lacking := [key for key, item in faults.items() if item["type"] == "missing"]:
        way_out = f"give {'it' if len(lacking) == 1 else 'them'}" + advice * any("." not in key for key in lacking)
        return f"{', '.join(lacking)} missing; {way_out}"
    key, item = next(iter(faults.items()))
    rule = item["msg"].removeprefix("Value error, ").replace("Input should ", "must ")
    rule = rule.replace("an object", "a table").replace("be a valid string", "be text")
    if keys := _keys_at(kind, item["loc"]):
        rule = f"{rule.replace('a valid array', 'a list of tables')}; its keys are {', '.join(keys)}"
    return f"{key} {rule}" if isinstance(item["input"], list | dict) else f"{key}={item['input']!r} {rule}"


def _keys_at(kind: Any, path: Iterable[str | int]) -> list[str]:
    """Return the keys of a table, or of each table of a list, given its path, or nothing for other values."""
    for name in (entry for entry in path if isinstance(entry, str)):
        hint = get_type_hints(kind).get(name) if is_dataclass(kind) else None
        kind = next(filter(is_dataclass, get_args(hint)), hint)
    return [field.name for field in fields(kind)] if is_dataclass(kind) else []
