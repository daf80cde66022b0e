"""Text of messages: a setting with its value, a problem of a setting, a list, and the nearest legal values."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from shlex import quote
from types import MappingProxyType
from typing import Any, TypeVar

_MAX_REASON_CHARS = 300


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text for a message, cut off if it is long, or its type without a text."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:_MAX_REASON_CHARS]


Result = TypeVar("Result")
Names = Mapping[str, "str | Setting"]
_NAMES: ContextVar[Names] = ContextVar("_NAMES", default=MappingProxyType({}))
"""Names that the caller of the running code has for settings. See `spelled_as`."""


@contextmanager
def spelled_as(names: Names) -> Iterator[None]:
    """Name settings as the caller does, in the messages that are made inside.

    Args:
        names: name of each key or option: an option of a command, an argument of a function, or words, or empty for a
            setting that the caller cannot set. A `Setting` replaces the value too.
    """
    token = _NAMES.set({**_NAMES.get(), **names})
    try:
        yield
    finally:
        _NAMES.reset(token)


def keep_names(function: Callable[..., Result]) -> Callable[..., Result]:
    """Return a function that names settings as its caller does now, in another process too. It can be pickled."""
    return partial(_call_with_names, dict(_NAMES.get()), function)


def _call_with_names(names: Names, function: Callable[..., Result], *arguments: Any) -> Result:
    with spelled_as(names):
        return function(*arguments)


@dataclass(frozen=True)
class Setting:
    """Mention of a setting in a message. Text has quotes without a format, but as in a shell after an option."""

    key: str
    """Recipe key, as "section.key", or an option of a command."""
    value: Any = None
    """Value. None means not shown."""

    def __format__(self, spec: str) -> str:
        """Return `key=value`, or the option or argument that `spelled_as` names for the key, with its value."""
        names = _NAMES.get()
        name: str | Setting = self.key
        while isinstance(name, str) and name in names:
            name = names[name]
        if isinstance(name, Setting) or not name or self.value is None:
            return str(name)
        is_option = name.startswith("--")
        is_apart = is_option or " " in name or (name.isupper() and name != self.key)
        value = quote(self.value) if is_option and isinstance(self.value, str) else _shown(self.value, spec)
        return f"{name}{'' if name.endswith('=') else ' ' if is_apart else '='}{value}"

    def __str__(self) -> str:
        """Return the setting without a format of its value."""
        return format(self, "")

    def problem(self, rule: str, way_out: str = "") -> "Problem":
        """Return the problem that the setting violates a rule."""
        return Problem(self.key, self.value, rule, way_out)


def _shown(value: Any, spec: str) -> str:
    if spec and spec != "s":
        return format(value, spec)
    if isinstance(value, bool):
        return str(value).lower()
    return str(value) if spec or isinstance(value, Path) else repr(value)


class UnquotedText(str):
    """Text that a message shows without quotes in place of a value, such as a shortened one."""

    def __repr__(self) -> str:
        """Return the text itself."""
        return str(self)


@dataclass(frozen=True)
class Problem:
    """Violation of a rule, as the fields of its message."""

    key: str
    """Recipe key, as "section.key", or an option, or empty for a message that is in `rule`."""
    value: Any
    """Value of the key. None means not shown."""
    rule: str
    """Rule on the value, or its incompatibility. It follows key and value in the message."""
    way_out: str = ""
    """Way out, which follows a semicolon."""

    def __str__(self) -> str:
        """Return the message: `key=value rule; way out`."""
        joint = "" if self.rule.startswith((":", ",")) else " "
        start = f"{Setting(self.key, self.value)}{joint}" if self.key else ""
        return f"{start}{self.rule}" + (f"; {self.way_out}" if self.way_out else "")


MAX_LISTED = 3
"""Number of items that a message lists."""


def format_list(items: Sequence[str]) -> str:
    """Join the first items of a list, with the number of the remaining ones."""
    listed = ", ".join(items[:MAX_LISTED])
    return listed if len(items) <= MAX_LISTED else f"{listed} and {len(items) - MAX_LISTED} more"


def nearest_numbers(value: int, legal: Iterable[int], count: int = 6) -> str:
    """Return up to `count` of the legal values closest to `value`, ascending: "1, 2 or 4"."""
    closest = sorted(sorted(set(legal), key=lambda number: (abs(number - value), number))[:count])
    return join_with_or([str(number) for number in closest])


def nearest_multiples(value: int, step: int) -> str:
    """Return the positive multiples of `step` next to `value`, which is not a multiple itself: "252 or 256"."""
    below = value // step * step
    return join_with_or([str(number) for number in (below, below + step) if number > 0])


def join_with_or(options: list[str]) -> str:
    """Join options as a choice: "a", "a or b", "a, b or c"."""
    return options[0] if len(options) == 1 else f"{', '.join(options[:-1])} or {options[-1]}"


def closest_match(name: str, candidates: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Return the candidate most similar to `name`, or None if none is close."""
    matches = get_close_matches(name, list(candidates), n=1, cutoff=cutoff)
    return matches[0] if matches else None
