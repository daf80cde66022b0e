"""What an exchange of rows is to be, before it is made."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class SplitSizes:
    """Rows that this rank sends to each member of a group, and those that it expects of each."""

    group_name: Literal["ep", "etp", "experts"]
    """The group: of ep, of etp, or all ep x etp ranks."""
    input_splits: Sequence[int]
    output_splits: Sequence[int]

    def reversed(self) -> "SplitSizes":
        """The same way in the other direction."""
        return SplitSizes(self.group_name, self.output_splits, self.input_splits)
