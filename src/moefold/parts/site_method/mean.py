"""Mean of the weights of the sites (local SGD, arXiv:1805.09767)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from moefold.config.groups.site_method import SiteMethodPart


@dataclass(frozen=True, kw_only=True)
class Mean(SiteMethodPart):
    """Take the mean of the weights of the sites."""

    def values(self, every: Any) -> Mapping[str, Any]:
        """Return the values by key."""
        return {"lr": 1.0, "momentum": 0.0}
