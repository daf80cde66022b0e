"""Reader of the values of a JSON file, of which one at a time is in memory."""

import codecs
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from moefold.bounded_read import MAX_LINE_BYTES
from moefold.errors import ConfigError

_SPACE = re.compile(r"[ \t\r\n]*")
_BLOCK_BYTES = 1 << 20


def text_blocks(file: BinaryIO, path: Path) -> Iterator[str]:
    """Yield the text of an open file in blocks, without a byte order mark; raise ConfigError if it is not UTF-8."""
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    try:
        while block := file.read(_BLOCK_BYTES):
            yield decoder.decode(block)
        decoder.decode(b"", final=True)
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 ({error.reason}); convert it, or leave it out") from None


class JsonStream:
    """Values of a JSON file.

    Args:
        blocks: its text.
        path: the file, for messages.
    """

    def __init__(self, blocks: Iterator[str], path: Path) -> None:
        self._path = path
        self._blocks = blocks
        self._text = ""
        self._position = 0
        self._line = 1
        self._counted = 0
        self._decoder = json.JSONDecoder()

    def elements(self) -> Iterator[tuple[int, str]]:
        """Yield the elements of the list that the file is, as JSON, each with the line on which it begins (1-based).

        Raises:
            ConfigError: it is not JSON; the message has the line.
        """
        is_first = True
        self._skip("[")
        while self.peek() != "]":
            if not is_first:
                self._skip(",")
                self.peek()
            is_first = False
            line = self._count_lines()
            yield line, self._next()[1]
        self._skip("]")
        if self.peek():
            raise ConfigError(
                f"{self._path}:{self._count_lines()} has text after its list; write one list, or one object a line"
            )

    def value(self) -> Any:
        """Return the next value; raise ConfigError if it is not JSON."""
        self.peek()
        return self._next()[0]

    def peek(self) -> str:
        """Return the next character that is no space, "" at the end of the file."""
        while True:
            match = _SPACE.match(self._text, self._position)
            self._position = match.end() if match else self._position
            if self._position < len(self._text):
                return self._text[self._position]
            if not self._fill():
                return ""

    def _next(self) -> tuple[Any, str]:
        """Return the value at the position, and its text."""
        while True:
            try:
                value, end = self._decoder.raw_decode(self._text, self._position)
                # A number at the end of a block may go on in the next one.
                if end < len(self._text) or not self._fill():
                    text = self._text[self._position : end]
                    self._position = end
                    return value, text
            except json.JSONDecodeError as error:
                is_too_long = len(self._text) - self._position > MAX_LINE_BYTES
                where = f"{error.msg} at character {error.pos - self._position}"
                if is_too_long or not self._fill():
                    raise self._error(f"is not JSON ({where}); fix or remove the element") from None
            except RecursionError:
                raise self._error("is not JSON (it is nested too deep); fix or remove the element") from None

    def _skip(self, character: str) -> None:
        if self.peek() != character:
            raise self._error(f"has no {character!r} where the JSON list needs one: the file is broken; copy it again")
        self._position += 1

    def _error(self, problem: str) -> ConfigError:
        return ConfigError(f"{self._path}:{self._count_lines()} {problem}")

    def _count_lines(self) -> int:
        """Return the line of the position."""
        self._line += self._text.count("\n", self._counted, self._position)
        self._counted = self._position
        return self._line

    def _fill(self) -> bool:
        """Read as much again as is left; return whether there was anything."""
        self._count_lines()
        left = self._text[self._position :]
        parts = [left]
        size = 0
        while size < max(1, len(left)) and (block := next(self._blocks, "")):
            parts.append(block)
            size += len(block)
        self._text = "".join(parts)
        self._position = self._counted = 0
        return size > 0
