"""Violation of a rule: the key, value, rule and way out of the message to the user."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Problem:
    """Violation of one rule."""

    key: str
    """Recipe key, as "section.key"."""
    value: Any
    """Value of the key; None if not shown."""
    rule: str
    """Rule on the value, or its incompatibility; follows key and value in the message."""
    way_out: str = ""
    """Way out, which follows a semicolon."""

    def __str__(self) -> str:
        """Return the message: `key=value rule; way out`."""
        text = str(self.value).lower() if isinstance(self.value, bool) else repr(self.value)
        value = "" if self.value is None else f"={text}"
        return f"{self.key}{value} {self.rule}" + (f"; {self.way_out}" if self.way_out else "")
