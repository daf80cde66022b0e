"""The [align] section: offline alignment with rewards or preferences; see docs/alignment.md."""

from dataclasses import dataclass
from typing import Annotated

from moefold.config.part import KindOf, Part, Section


@dataclass(frozen=True, kw_only=True, slots=True)
class AlignConfig(Section):
    """Offline alignment with rewards or preferences ([alignment.md](alignment.md))."""

    method: Annotated[str | Part, KindOf("alignment")] = "none"
    """none: no alignment. With data.kind "sft" and a reward in each row: filter trains on the rows with high rewards,
    weight scales each row's loss by exp(reward / beta), condition writes the reward into the prompt (arXiv:2308.12050).
    With data.kind "preference": dpo (arXiv:2305.18290), ipo (arXiv:2310.12036), simpo (arXiv:2405.14734), kto
    (arXiv:2402.01306)."""
