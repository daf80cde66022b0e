"""Reasoning in the text of an answer, between `<think>` and `</think>`."""

from moefold.errors import ConfigError

BEGIN = "<think>"
END = "</think>"
MARKS = frozenset({BEGIN, END})


def check_reasons(source: str, location: str) -> None:
    """Raise ConfigError if a chat template has no marks of reasoning."""
    if END not in source:
        raise ConfigError(
            f"--reasoning has no effect: the chat template of {location} has no {BEGIN} and {END}; leave it out, or "
            "name a template that has them with --chat-template"
        )


class ReasoningReader:
    """Reader that splits the text of an answer into reasoning and the rest, as it arrives.

    Args:
        is_open: whether the prompt ends inside reasoning. Otherwise an answer may begin with reasoning.
    """

    def __init__(self, *, is_open: bool) -> None:
        self._is_open = is_open
        self._is_done = False
        self._pending = ""

    def push(self, text: str, *, is_end: bool) -> tuple[str, str]:
        """Add the next part of the answer, and return the final reasoning and the final other text."""
        if self._is_done:
            return "", text
        self._pending += text
        if not self._is_open:
            start = self._pending.lstrip()
            if not start.startswith(BEGIN):
                self._is_done = is_end or not BEGIN.startswith(start)
                return "", self._take(len(self._pending) if self._is_done else 0)
            self._is_open = True
            self._pending = start[len(BEGIN) :]
        end = self._pending.find(END)
        if end >= 0:
            self._is_done = True
            reasoning = self._take(end)
            return reasoning, self._take(len(self._pending))[len(END) :]
        num_held = 0 if is_end else next(n for n in range(len(END) - 1, -1, -1) if self._pending.endswith(END[:n]))
        return self._take(len(self._pending) - num_held), ""

    def _take(self, length: int) -> str:
        text = self._pending[:length]
        self._pending = self._pending[length:]
        return text
