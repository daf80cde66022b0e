"""The [align] section: offline alignment with rewards or preferences, described in docs/alignment.md."""

from dataclasses import dataclass
from typing import Annotated

from moefold.config.base.part import KindOf, Part, Section


@dataclass(frozen=True, kw_only=True, slots=True)
class AlignConfig(Section):
    """Offline alignment with rewards or preferences ([alignment.md](alignment.md))."""

    method: Annotated[str | Part, KindOf("alignment")] = "none"
    """Method of alignment, on conversations with rewards (data.kind "sft" with a reward in each row) or on preferences
    (data.kind "preference")."""
