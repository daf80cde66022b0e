"""What an exchange of rows is to be, before it is made."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Exchange:
    """Rows that this rank sends to each member of a group, and those that it expects of each."""

    over: Literal["ep", "etp", "experts"]
    """The group: of ep, of etp, or all ep x etp ranks."""
    send_rows: Sequence[int]
    receive_rows: Sequence[int]

    def back(self) -> "Exchange":
        """The same way in the other direction."""
        return Exchange(self.over, self.receive_rows, self.send_rows)
