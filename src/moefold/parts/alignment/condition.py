"""Prompts that name the reward of their answer (arXiv:2308.12050)."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from moefold.config.groups.alignment import AlignmentPart
from moefold.config.part import FlatKey


@dataclass(frozen=True, kw_only=True)
class RewardCondition(AlignmentPart):
    """The reward is written into the prompt."""

    changes_maths: ClassVar[bool] = False
    data_kind: ClassVar[str] = "sft"
    conditions: ClassVar[bool] = True
    reward: Annotated[str, FlatKey("align.reward")]
    template: Annotated[str, FlatKey("align.template")]
    want: Annotated[float, FlatKey("align.want")]
