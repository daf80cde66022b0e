"""Text of new tokens while they are generated: decoding, and stop strings."""

from collections.abc import Sequence

from moefold.data.tokenizer import Tokenizer

REPLACEMENT_CHARACTER = "\ufffd"
"""Result of decoding an incomplete or invalid UTF-8 sequence."""


def has_stop_string(tokenizer: Tokenizer, stops: Sequence[str], tokens: Sequence[int]) -> bool:
    """Return whether the last token completes a stop string. Only tokens that can be part of it are decoded."""
    # Each token has at least one byte; 4 more bytes, because the first may be part of a character.
    text = tokenizer.decode(tokens[-max(len(stop.encode()) for stop in stops) - 4 :])
    return any(stop in text for stop in stops)


class TextStream:
    """Incremental detokenizer: converts ids to final pieces of text.

    Ids are decoded together with previous ids, because a tokenizer may emit a space or part of a character that depends
    on them. A piece with an incomplete character at its end is held back until the character is complete.
    """

    def __init__(self, tokenizer: Tokenizer, prefix_ids: Sequence[int] = ()) -> None:
        """Create a stream. `prefix_ids` are decoding context for the first id and produce no text."""
        self._tokenizer = tokenizer
        self._ids: list[int] = list(prefix_ids)
        self._emitted_end = len(self._ids)
        """Index of the first id whose text has not been emitted."""
        self._context_start = 0
        """Index of the first id that is decoded again, as context for later ids."""

    def push(self, token: int) -> str:
        """Add an id and return the text that is now final, which is often empty."""
        self._ids.append(token)
        return self._advance(is_end=False)

    def finish(self) -> str:
        """End the stream, and return the text that was held back."""
        return self._advance(is_end=True)

    def _advance(self, *, is_end: bool) -> str:
        before = self._tokenizer.decode(self._ids[self._context_start : self._emitted_end])
        text = self._tokenizer.decode(self._ids[self._context_start :])
        if text.endswith(REPLACEMENT_CHARACTER) and not is_end:
            return ""
        self._context_start, self._emitted_end = self._emitted_end, len(self._ids)
        return text[len(before) :]


class StopStringFilter:
    """Streaming filter that emits text up to the first stop string, and holds back possible prefixes of stop strings.

    Without any stop string, or only with "", all text is emitted.
    """

    def __init__(self, *stop_strings: str) -> None:
        self._stop_strings = [stop for stop in stop_strings if stop]
        self._pending_text = ""
        self.is_stopped = False
        """True if a stop string was found."""

    def push(self, text: str) -> str:
        """Add text and return the text that can be emitted."""
        if self.is_stopped or not self._stop_strings:
            return "" if self.is_stopped else text
        pending = self._pending_text + text
        starts = [start for stop in self._stop_strings if (start := pending.find(stop)) >= 0]
        self.is_stopped = bool(starts)
        emitted = min(starts) if starts else len(pending) - self._partial_match_length(pending)
        self._pending_text = pending[emitted:]
        return pending[:emitted]

    def finish(self) -> str:
        """Return the text held back, unless a stop string was found."""
        pending = "" if self.is_stopped else self._pending_text
        self._pending_text = ""
        return pending

    def _partial_match_length(self, text: str) -> int:
        """Return the length of the longest suffix of a text that is a proper prefix of a stop string."""
        longest = min(len(text), max(map(len, self._stop_strings)) - 1)
        lengths = range(longest, 0, -1)
        return next((n for n in lengths if any(stop.startswith(text[-n:]) for stop in self._stop_strings)), 0)
