"""Methods of sites."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from moefold.config.groups.site_method import SiteMethodPart


@dataclass(frozen=True, kw_only=True)
class MeanSiteMethod(SiteMethodPart, kind="mean"):
    """Take the mean of the weights of the sites (local SGD, arXiv:1805.09767)."""

    def values(self, every: Any) -> Mapping[str, Any]:
        """Return the values by key."""
        return {"lr": 1.0, "momentum": 0.0}


@dataclass(frozen=True, kw_only=True)
class DiLoCoSiteMethod(SiteMethodPart, kind="diloco"):
    """Take a step with Nesterov momentum along the mean difference (arXiv:2311.08105).

    The paper exchanges every 500 steps. It pays off after hundreds of rounds.
    """

    def values(self, every: Any) -> Mapping[str, Any]:
        """Return the values by key."""
        return {"lr": 0.7, "momentum": 0.9}


@dataclass(frozen=True, kw_only=True)
class StreamingDiLoCoSiteMethod(SiteMethodPart, kind="streaming"):
    """Exchange one fragment of the layers after the other, in 4 bits and overlapped with training.

    arXiv:2501.18512. The paper exchanges each fragment every 30 or 100 steps.
    """

    def values(self, every: Any) -> Mapping[str, Any]:
        """Return the values by key."""
        return {
            "lr": 0.4,
            "momentum": 0.9,
            "fragment_layers": 3,
            "overlap": 1,
            "keep_local": 0.5,
            "precision": "fp4",
        }
