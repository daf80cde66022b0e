"""One broken rule with its fields: key, value, rule and way out, from which the message to the user is made."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Problem:
    """One broken rule."""

    key: str
    """Recipe key, as "section.key"."""
    value: Any
    """Its value; None: the message shows none."""
    rule: str
    """What the value must be, or does not go with, as it follows key and value in the message."""
    way_out: str = ""
    """What to write instead, as it follows a semicolon."""

    def __str__(self) -> str:
        """Return the message: `key=value rule; way out`."""
        text = str(self.value).lower() if isinstance(self.value, bool) else repr(self.value)
        shown = "" if self.value is None else f"={text}"
        return f"{self.key}{shown} {self.rule}" + (f"; {self.way_out}" if self.way_out else "")
