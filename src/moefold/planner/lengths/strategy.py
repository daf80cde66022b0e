"""Attention strategy: the recipe's keys that say how the ranks of a round share attention. Torch-free."""

from dataclasses import dataclass, replace
from typing import Literal

from moefold.config.find import find_part, kind_of
from moefold.config.groups.context import ContextPart
from moefold.config.parallel import ParallelConfig
from moefold.config.part import Part
from moefold.topology.token_placement import PlacementKind

HostKind = Literal["home", "balanced"]


@dataclass(frozen=True, kw_only=True)
class AttentionStrategy:
    """Context parallelism of a recipe: keys of its [parallel] section, see there."""

    context: str | Part = "ring"
    placement: PlacementKind = "samples"
    hosts: HostKind = "home"
    tolerance: float = 0.1
    pool: int = 0
    block: int = 128

    @staticmethod
    def from_config(p: ParallelConfig) -> "AttentionStrategy":
        """Return the strategy of a recipe."""
        return AttentionStrategy(
            context=p.context,
            placement=p.placement,
            hosts=p.attention_hosts,
            tolerance=p.attention_tolerance,
            pool=p.attention_pool,
            block=p.attention_block,
        )

    def apply(self, p: ParallelConfig) -> ParallelConfig:
        """Return a recipe's [parallel] section with this strategy."""
        return replace(
            p,
            context=self.context,
            placement=self.placement,
            attention_hosts=self.hosts,
            attention_tolerance=self.tolerance,
            attention_pool=self.pool,
            attention_block=self.block,
        )

    @property
    def is_planned(self) -> bool:
        """True if only the needed rows of keys and values are exchanged."""
        return self._facts.is_planned

    @property
    def shards_heads(self) -> bool:
        """True if a rank computes whole sequences for its share of the heads."""
        return self._facts.shards_heads

    @property
    def _facts(self) -> type[ContextPart]:
        if not isinstance(self.context, str):
            assert isinstance(self.context, ContextPart), "the loader builds parts of the group of the key"
            return type(self.context)
        found: type[ContextPart] = find_part(ContextPart.group, self.context)
        return found

    def describe(self) -> str:
        """Describe the strategy, such as "planned attention (documents, balanced hosts)"."""
        if not self.is_planned:
            return f"{kind_of(self._facts)} attention"
        return f"planned attention ({self.placement}, {self.hosts} hosts)"

    def as_dict(self) -> dict[str, str]:
        """Return the chosen keys of the [parallel] section."""
        return {"context": kind_of(self._facts), "placement": self.placement, "attention_hosts": self.hosts}
