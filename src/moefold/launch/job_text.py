"""Text of job files: a value reaches a template only through a filter that escapes it for its place. Torch-free.

A template is a Jinja file in `job_templates/`. `{{ value }}` without a filter is refused, numbers apart, so that a
template cannot forget one.
"""

import os
import re
import shlex
from collections.abc import Callable
from importlib.resources import files

from moefold.errors import ConfigError
from moefold.terminal import escape_char

_PLAIN = re.compile(r"[A-Za-z0-9][\w.:+/@-]*", re.ASCII)


class _Escaped(str):
    """Text that a filter has escaped."""

    __slots__ = ()


def fill_template(scheduler: str, job: object) -> str:
    """Return a job file.

    Args:
        scheduler: name of the template.
        job: values that it inserts, as attributes.
    """
    # Lazy import: an error of the request is reported without it.
    from jinja2 import Environment, StrictUndefined

    environment = Environment(
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=StrictUndefined,
        autoescape=False,
        finalize=_check_escaped,
    )
    environment.filters |= {name: _as_escaped(escape) for name, escape in ESCAPES.items()}
    environment.filters["pod"] = escape_pod
    text = (files("moefold.launch") / "job_templates" / f"{scheduler}.jinja").read_text(encoding="utf-8")
    return environment.from_string(text).render(job=job)


def escape_comment(value: object) -> str:
    """Return text for a comment: one line, without characters that end a line, reorder it or are not text."""
    return "".join(char if char.isprintable() else escape_char(char) for char in str(value))


def escape_plain(value: object) -> str:
    """Return a name that needs no quotes anywhere; others are an error of the caller."""
    text = str(value)
    assert _PLAIN.fullmatch(text), text
    return text


def escape_shell(words: list[str]) -> str:
    """Return the words of a command for bash, in ASCII where a word has characters that are not printable.

    `{{` is split by empty quotes, as SkyPilot fills templates of its own.
    """
    return " ".join(_shell_word(word) for word in words)


def escape_yaml(value: str | list[str]) -> str:
    """Return a string, or a list of strings, as quoted YAML.

    Raises:
        ConfigError: a string has bytes that are not UTF-8.
    """
    if isinstance(value, list):
        return "[" + ", ".join(map(escape_yaml, value)) + "]"
    if any("\ud800" <= char <= "\udfff" for char in value):
        raise ConfigError(f"{value!r} is not text in UTF-8, and YAML holds nothing else; rename the file")
    return (
        '"' + "".join(char if char.isprintable() and char not in '"\\' else escape_char(char) for char in value) + '"'
    )


def escape_pod(words: list[str]) -> list[str]:
    """Return words for the arguments of a pod: Kubernetes expands `$(NAME)` there, and reads `$$` as `$`."""
    return [word.replace("$", "$$") for word in words]


ESCAPES: dict[str, Callable[..., object]] = {
    "comment": escape_comment,
    "plain": escape_plain,
    "shell": escape_shell,
    "yaml": escape_yaml,
    "python": repr,
}
"""Filters of the templates."""


def _as_escaped(escape: Callable[..., object]) -> Callable[..., _Escaped]:
    return lambda value: _Escaped(escape(value))


def _check_escaped(value: object) -> object:
    assert isinstance(value, int | _Escaped), f"a template inserts {value!r} without a filter"
    return value


def _shell_word(word: str) -> str:
    if word.isprintable():
        return re.sub(r"\{(?=\{)", "{''", shlex.quote(word))
    codes = (
        char if char.isprintable() and char not in "'\\{" else "".join(f"\\x{byte:02x}" for byte in os.fsencode(char))
        for char in word
    )
    return "$'" + "".join(codes) + "'"
