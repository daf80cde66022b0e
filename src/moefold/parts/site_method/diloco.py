"""DiLoCo (arXiv:2311.08105); the paper exchanges every 500 steps."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from moefold.config.groups.site_method import SiteMethodPart


@dataclass(frozen=True, kw_only=True)
class DiLoCo(SiteMethodPart):
    """Take a step with Nesterov momentum along the mean difference; it pays off after hundreds of rounds."""

    def values(self, every: Any) -> Mapping[str, Any]:
        """Return the values by key."""
        return {"lr": 0.7, "momentum": 0.9}
