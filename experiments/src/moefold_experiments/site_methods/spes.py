"""SPES (arXiv:2602.11543): each site trains its own experts."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from moefold.config.groups.site_method import SiteMethodPart


@dataclass(frozen=True, kw_only=True)
class SPES(SiteMethodPart):
    """Take the mean of the weights, and let each site train its own experts, which are merged in the warm-up."""

    interface: ClassVar[int] = 1

    def values(self, every: Any) -> Mapping[str, Any]:
        """Return the values by key."""
        return {"lr": 1.0, "momentum": 0.0, "every": 50, "experts": "own", "merge_experts": 0.01}
