"""CO2 (arXiv:2401.16265), where every is 48."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from moefold.config.groups.site_method import SiteMethodPart


@dataclass(frozen=True, kw_only=True)
class CO2(SiteMethodPart):
    """Exchange the differences of a round during the whole next one."""

    interface: ClassVar[int] = 1

    def values(self, every: Any) -> Mapping[str, Any]:
        """Return the values by key."""
        return {
            "lr": 1.0,
            "momentum": 0.2,
            "nesterov": False,
            "penalty": True,
            "clip": 1.0,
            "overlap": every,
        }
