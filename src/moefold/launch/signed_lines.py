"""Signed JSON lines between the sites and their meeting point, and the checked fields of a request.

A line is the HMAC-SHA256 of its direction, its number in the connection and its content, in hexadecimal, a space, and
one JSON object. The key of a connection is derived from the shared secret and a random number of each side, so that a
line of another connection, direction or position is refused. An empty secret is known to everyone: it is for meeting
points that only this machine can reach.
"""

import hmac
import json
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moefold.bounded_read import read_text
from moefold.errors import ConfigError

MAX_LINE_BYTES = 64 * 2**10
"""Longest line, with its signature and line feed."""
SECRET_VARIABLE = "MOEFOLD_SITES_SECRET"
"""Environment variable with the shared secret."""
MIN_SECRET_CHARS = 16
NONCE_BYTES = 16
MAX_KEY_CHARS = 512
MAX_WAIT_S = 24 * 3600.0
"""Longest timeout that a site may ask for."""

Message = dict[str, Any]


class BadLineError(Exception):
    """A line that is too long, not signed with the shared secret, or not a JSON object."""


class SignedLines:
    """Signatures of one connection, seen from one of its sides."""

    def __init__(self, secret: bytes, server_nonce: str, client_nonce: str, *, is_server: bool) -> None:
        self._key = _sign(secret, f"{server_nonce} {client_nonce}".encode())
        self._out = b"server" if is_server else b"client"
        self._in = b"client" if is_server else b"server"
        self._num_out = 0
        self._num_in = 0

    def seal(self, message: Mapping[str, Any]) -> bytes:
        """Return the next line to send. Raise BadLineError if the line would be too long."""
        content = json.dumps(message, allow_nan=False).encode()
        self._num_out += 1
        line = b"%s %s\n" % (self._signature(self._out, self._num_out, content), content)
        if len(line) > MAX_LINE_BYTES:
            raise BadLineError(f"a message of {len(line)} bytes is longer than {MAX_LINE_BYTES}")
        return line

    def open(self, line: bytes) -> Message:
        """Return the message of the next received line.

        Raises:
            BadLineError: the signature is wrong, or the content is not a JSON object.
        """
        signature, _, content = line.rstrip(b"\n").partition(b" ")
        self._num_in += 1
        if not hmac.compare_digest(signature, self._signature(self._in, self._num_in, content)):
            raise BadLineError("the signature does not fit the shared secret")
        return parse_object(content)

    def _signature(self, direction: bytes, number: int, content: bytes) -> bytes:
        return _sign(self._key, b"%s %d %s" % (direction, number, content)).hex().encode()


def _sign(key: bytes, content: bytes) -> bytes:
    # An empty key is legal.
    return hmac.new(key, content, "sha256").digest()


def parse_object(content: bytes) -> Message:
    """Parse one JSON object. Raise BadLineError if it is something else."""
    try:
        message = json.loads(content)
    except (ValueError, RecursionError):
        raise BadLineError("the content is not JSON") from None
    if not isinstance(message, dict):
        raise BadLineError("the content is not a JSON object")
    return message


def new_nonce() -> str:
    """Return a random number in hexadecimal."""
    return secrets.token_hex(NONCE_BYTES)


def is_nonce(value: Any) -> bool:
    """Return whether a value has the form of `new_nonce`."""
    return isinstance(value, str) and len(value) == 2 * NONCE_BYTES and set(value) <= set("0123456789abcdef")


def read_secret(file: str, key: str, environment: Mapping[str, str] = os.environ) -> bytes:
    """Return the shared secret of a file, else of the environment variable, or empty if there is none.

    Args:
        file: the file. Empty means none.
        key: name of the setting that names the file, for messages.

    Raises:
        ConfigError: the file cannot be read, or the secret is too short.
    """
    name = f"{key}={file!r}" if file else SECRET_VARIABLE
    try:
        text = read_text(Path(file), MAX_LINE_BYTES) if file else environment.get(SECRET_VARIABLE, "")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ConfigError(f"{name} cannot be read: {reason}; name a file with the shared secret") from None
    secret = text.strip()
    if (file or secret) and len(secret) < MIN_SECRET_CHARS:
        raise ConfigError(
            f"{name} holds a secret of {len(secret)} characters, and needs at least {MIN_SECRET_CHARS}; "
            "`openssl rand -hex 32` makes one"
        )
    return secret.encode()


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
