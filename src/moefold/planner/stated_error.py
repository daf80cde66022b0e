"""Error of predicted throughput that every plan states."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class StatedError:
    """Error of predicted throughput in percent, as plans state it; docs/cost-model.md describes the rows."""

    unseen_mean_pct: int = 15
    """Published rows that the fit did not see."""
    unseen_median_pct: int = 8
    new_mean_pct: int = 26
    """Rows published in 2026, after the fit."""
    new_median_pct: int = 21
    worst_fitted_pct: int = 83
    tie_pct: int = 7
    """Median error of the ratio of two mappings of one unseen case."""

    def __str__(self) -> str:
        return (
            f"unseen rows are missed by {self.unseen_mean_pct} % on average ({self.unseen_median_pct} % median), new "
            f"rows of 2026 by {self.new_mean_pct} % ({self.new_median_pct} % median), the worst fitted row by "
            f"{self.worst_fitted_pct} % (docs/cost-model.md); treat mappings that differ by less than "
            f"{self.tie_pct} % as equal."
        )


STATED_ERROR = StatedError()
