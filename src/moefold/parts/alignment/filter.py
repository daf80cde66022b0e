"""Training on the conversations with high rewards."""

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from moefold.config.groups.alignment import AlignmentPart
from moefold.config.part import FlatKey


@dataclass(frozen=True, kw_only=True)
class RewardFilter(AlignmentPart):
    """The conversations whose reward reaches the threshold."""

    changes_maths: ClassVar[bool] = False
    data_kind: ClassVar[str] = "sft"
    selects: ClassVar[bool] = True
    reward: Annotated[str, FlatKey("align.reward")]
    threshold: Annotated[float | str, FlatKey("align.threshold")]

    def select(self, rewards: Any, members: Any) -> Any:
        """Return the conversations above the threshold."""
        return rewards.filter(members)
