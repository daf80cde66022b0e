"""Upper bounds of recipe values, checked before anything is derived from the values.

Each bound is far above the values of any real run. The annotation of a key's field may have the bound
(`config/base/field.py`). Otherwise the default of its type applies.
"""

from collections.abc import Mapping
from math import inf
from typing import Any, get_args

from moefold.config.base.path_rules import non_unicode_reason
from moefold.errors import ConfigError
from moefold.message_text import Setting

FORMAT = 2
"""Format of recipes and checkpoints that this version writes. It reads older ones."""
FORMAT_KEY = "format"
"""Key above the sections of a recipe with its format."""
MAX_RANKS = 2**30
MAX_STEPS = 10**9
MAX_LAYERS = 10_000
"""Layers of a model, which limits the memory for untrusted text."""
MAX_SAMPLE_TOKENS = 2**24
"""Tokens per sample."""
MAX_MICRO_BATCHES = 2**16
"""Micro-batches per data-parallel rank and step: schedules are lists of them."""
MAX_CHARACTERS = 10_000
"""Length of a string."""
MAX_INTEGER_BITS = 200
"""Maximum bits of an integer that error messages print in digits."""
MAX_NESTING_DEPTH = 8
"""Nesting depth of lists in a value. No key takes more than one level."""

MAX_INTEGER = 2**53
"""Default bound of integers: exact in JSON and float64."""
MAX_NUMBER = 1e15
MAX_WIDTH = 2**20
"""Width of a dim of a model, or number of experts or heads."""


def value_unsupported_reason(hint: Any, maximum: float | None, value: Any) -> str:
    """Return the violated size rule of a value, or its illegal character, or "" if it is valid.

    Args:
        maximum: largest magnitude of a number. None: the key does not take numbers.
    """
    if isinstance(value, int | float) and maximum is not None and abs(value) > maximum and abs(value) != inf:
        bound = f"{maximum}" if isinstance(maximum, int) else f"{maximum:.15g}"
        return f"must be at most {bound}" if value > 0 else f"must be at least -{bound}"
    texts = value if isinstance(value, list) else [value]
    for text in texts:
        if isinstance(text, str) and len(text) > MAX_CHARACTERS:
            return f"has {len(text)} characters, and must have at most {MAX_CHARACTERS}"
        if isinstance(text, str) and "\0" in text:
            return "has a NUL character, which no path and no name can have"
        if isinstance(text, str) and (reason := non_unicode_reason(text)):
            return reason
    numbers = value if isinstance(value, list) and float in get_args(hint) else []
    if any(isinstance(number, int | float) and not abs(number) <= MAX_NUMBER for number in numbers):
        return f"must hold numbers of at most {MAX_NUMBER:.0e}"
    return ""


def is_oversized(value: Any, max_depth: int = MAX_NESTING_DEPTH) -> bool:
    """Return whether an integer is too large to print, or lists and tables are nested too deep."""
    if isinstance(value, int):
        return value.bit_length() > MAX_INTEGER_BITS
    if not isinstance(value, list | dict):
        return False
    inner = value.values() if isinstance(value, dict) else value
    return max_depth == 0 or any(is_oversized(entry, max_depth - 1) for entry in inner)


def check_at_most(name: str, value: int, maximum: int) -> None:
    """Check a number of the command line against the upper bound of its recipe key.

    Raises:
        ConfigError: the number is larger.
    """
    if value > maximum:
        text = value if value.bit_length() <= MAX_INTEGER_BITS else f"({value.bit_length()} bits)"
        raise ConfigError(f"{Setting(name, text):s} must be at most {maximum}")


def parse_count(text: str) -> int | None:
    """Return the integer of a string of decimal digits, at most MAX_INTEGER, or None for any other text."""
    if not (text.isascii() and text.isdecimal()):
        return None
    digits = text.lstrip("0") or "0"
    return int(digits) if len(digits) <= len(str(MAX_INTEGER)) else MAX_INTEGER


def check_format(tree: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the sections of a recipe without its format.

    Args:
        name: the file, for messages.

    Raises:
        ConfigError: the format is newer than this version of moefold.
    """
    version = tree.get(FORMAT_KEY, FORMAT)
    if type(version) is not int or not 1 <= version <= FORMAT:
        way_out = "update it" if type(version) is int and version > FORMAT else f"write {FORMAT_KEY} = {FORMAT}"
        raise ConfigError(f"{name} has format {version!r}, and this version of moefold reads up to {FORMAT}; {way_out}")
    return {key: value for key, value in tree.items() if key != FORMAT_KEY}
