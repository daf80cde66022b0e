"""NoLoCo (arXiv:2506.10911 and its code): random pairs of sites, whose outer weights also pull each other."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from moefold.config.groups.site_method import SiteMethodPart
from moefold.message_text import Problem

if TYPE_CHECKING:
    from moefold.config.sections.sites import SitesConfig
    from moefold.optim.outer import OuterOptimizer


@dataclass(frozen=True, kw_only=True)
class NoLoCo(SiteMethodPart):
    """Exchange between random pairs of sites, with a pull between their outer weights."""

    interface: ClassVar[int] = 1
    in_pairs: ClassVar[bool] = True

    def values(self, every: Any) -> Mapping[str, Any]:
        """Return the values by key."""
        return {"lr": 0.7, "momentum": 0.5, "nesterov": False, "every": 50}

    def check(self, sites: "SitesConfig") -> Iterator[Problem]:  # type: ignore[override]
        """Yield a problem if the run has one site."""
        if sites.count == 1:
            yield Problem(
                self.key,
                self.kind,
                "exchanges between two sites, and sites.count=1",
                "set sites.count, or choose sites.method='diloco'",
            )

    def outer(self) -> "type[OuterOptimizer]":
        """Return the outer optimizer of a site that meets one other."""
        from moefold_experiments.noloco.module import OuterOfPairs

        return OuterOfPairs
