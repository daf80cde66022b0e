"""No alignment."""

from dataclasses import dataclass
from typing import ClassVar

from moefold.config.groups.alignment import AlignmentPart


@dataclass(frozen=True, kw_only=True)
class NoAlignment(AlignmentPart):
    """The loss of the next tokens."""

    changes_maths: ClassVar[bool] = False
    changes_training: ClassVar[bool] = False
