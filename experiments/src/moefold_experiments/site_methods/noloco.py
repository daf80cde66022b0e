"""NoLoCo (arXiv:2506.10911 and its code): random pairs of sites, whose outer weights also pull each other."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from moefold.config.groups.site_method import SiteMethodPart


@dataclass(frozen=True, kw_only=True)
class NoLoCo(SiteMethodPart):
    """Exchange between random pairs of sites, with a pull between their outer weights."""

    interface: ClassVar[int] = 1

    def values(self, every: Any) -> Mapping[str, Any]:
        """Return the values by key."""
        return {"topology": "pairs", "lr": 0.7, "momentum": 0.5, "nesterov": False, "every": 50}
