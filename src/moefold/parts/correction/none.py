"""No correction."""

from dataclasses import dataclass
from typing import ClassVar

from moefold.config.groups.policy import CorrectionFormula, CorrectionPart


@dataclass(frozen=True, kw_only=True)
class NoCorrection(CorrectionPart):
    """The unchanged loss."""

    corrects: ClassVar[bool] = False

    def formula(self) -> CorrectionFormula:
        """Return 1."""
        return lambda differences, of_rollout, position: 1.0
