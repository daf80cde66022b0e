"""SparseLoCo (arXiv:2508.15706), where every is 15 to 250."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from moefold.config.groups.site_method import SiteMethodPart


@dataclass(frozen=True, kw_only=True)
class SparseLoCo(SiteMethodPart):
    """Send the largest 64 of 4096 differences in 2 bits, and add the others to the next round."""

    interface: ClassVar[int] = 1

    def values(self, every: Any) -> Mapping[str, Any]:
        """Return the values by key."""
        return {"lr": 1.0, "momentum": 0.0, "density": 1 / 64, "values": 2, "residual": 0.95}
