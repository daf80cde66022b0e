"""Streaming DiLoCo (arXiv:2501.18512); the paper exchanges each fragment every 30 or 100 steps."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from moefold.config.groups.site_method import SiteMethodPart


@dataclass(frozen=True, kw_only=True)
class StreamingDiLoCo(SiteMethodPart):
    """Exchange one fragment of the layers after the other, in 4 bits and overlapped with training."""

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
