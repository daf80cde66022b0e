"""CO2 (arXiv:2401.16265), where every is 48: a round is exchanged during the whole next one."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from moefold.config.base.field import VerifyAs, at_least
from moefold.config.base.part import UnusedKeys
from moefold.config.groups.site_method import SiteMethodPart
from moefold.message_text import Problem

if TYPE_CHECKING:
    from moefold.config.model import ModelConfig
    from moefold.config.sections.sites import SitesConfig
    from moefold.optim.outer import OuterOptimizer
    from moefold.planner.sites import SiteCost


@dataclass(frozen=True, kw_only=True)
class CO2(SiteMethodPart):
    """Exchange the differences of a round during the whole next one."""

    interface: ClassVar[int] = 1
    overlaps_whole_round: ClassVar[bool] = True

    penalty: Annotated[bool, VerifyAs.ROUNDS] = True
    """Divide the mean difference by 1 plus the norm of the outer step that was taken since it was measured, over its
    own norm."""
    clip: Annotated[float, at_least(0, "0: no limit"), VerifyAs.ROUNDS] = 1.0
    """Largest magnitude of an element of the momentum; 0: no limit."""

    def values(self, every: Any) -> Mapping[str, Any]:
        """Return the values by key."""
        return {"lr": 1.0, "momentum": 0.2, "nesterov": False, "overlap": every}

    @property
    def has_outer_step(self) -> bool:
        """Return whether the mean is divided."""
        return self.penalty

    def check(self, model: "ModelConfig", sites: "SitesConfig") -> Iterator[Problem]:  # type: ignore[override]
        """Yield keys that leave no whole round to overlap with."""
        from moefold.topology.fragments import recipe_fragments

        if sites.overlap != sites.every:
            yield Problem(
                "sites.overlap",
                sites.overlap,
                f"must be equal to sites.every={sites.every} with sites.method='co2', which exchanges a round during "
                "the whole next one",
                f"choose {sites.every}",
            )
        if recipe_fragments(model, sites) > 1:
            yield Problem(
                "sites.fragment_layers",
                sites.fragment_layers,
                "has a round for a part of the layers, and sites.method='co2' exchanges all layers in one",
                "choose 0",
            )
        if self.clip and not sites.momentum:
            yield Problem(f"{self.key}.clip", self.clip, "limits a momentum, and sites.momentum=0", "choose 0")

    def unused_keys(self) -> Iterator[UnusedKeys]:
        """Yield the share of weights that no round begins with."""
        yield UnusedKeys(
            "sites.keep_local",
            "with sites.method='co2', a site begins each round at the outer weights",
            "choose another sites.method",
        )

    def outer(self) -> "type[OuterOptimizer]":
        """Return the outer optimizer that moves weights and outer weights alike."""
        from moefold_experiments.co2.module import OuterOfWholeRounds

        return OuterOfWholeRounds

    def least_every(self, cost: "SiteCost", precision: str) -> int:
        """Return the fewest steps of a round in which its exchange is hidden well enough."""
        from moefold.planner.sites import MEETING_MESSAGES, TARGET, round_up

        meeting_s = MEETING_MESSAGES * cost.link.latency_s
        (volume,) = cost.volumes[precision]
        # H * t is at least u / (1 - u) times the exposed time, whether a part of the exchange is exposed or not.
        part_exposed_s = TARGET * (meeting_s + cost.exchange_s(volume))
        return max(1, round_up(max(TARGET / (1 - TARGET) * meeting_s, part_exposed_s) / cost.step_s))
