"""Fields of the requests of sites to the meeting point, each checked for its type and size."""

from collections.abc import Mapping
from typing import Any

MAX_KEY_CHARS = 512
MAX_WAIT_S = 24 * 3600.0
"""Longest timeout that a site may ask for."""


class BadRequestError(Exception):
    """A message with missing or wrong fields."""


def int_field(message: Mapping[str, Any], key: str) -> int:
    """Return an integer of a request, of 64 bits."""
    value = message.get(key)
    if type(value) is not int or not -(2**63) <= value < 2**63:
        raise BadRequestError(f"{key} must be an integer")
    return value


def text_field(message: Mapping[str, Any], key: str, max_chars: int = MAX_KEY_CHARS) -> str:
    """Return a text of a request."""
    value = message.get(key)
    if not isinstance(value, str) or len(value) > max_chars:
        raise BadRequestError(f"{key} must be a text")
    return value


def seconds_field(message: Mapping[str, Any]) -> float:
    """Return the time limit of a request."""
    value = message.get("timeout_s")
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= MAX_WAIT_S:
        raise BadRequestError("timeout_s must be a number of seconds")
    return float(value)
