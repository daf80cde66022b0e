"""How the ranks of a round share attention: the recipe's keys of context parallelism. Torch-free."""

from dataclasses import dataclass, replace

from moefold.config.schema import ParallelConfig
from moefold.topology.token_placement import PlacementKind


@dataclass(frozen=True, kw_only=True)
class AttentionStrategy:
    """Context parallelism of a recipe: keys of its [parallel] section."""

    context: str = "ring"
    placement: PlacementKind = "samples"
    hosts: str = "home"
    tolerance: float = 0.1
    pool: int = 0
    block: int = 128

    @staticmethod
    def from_config(p: ParallelConfig) -> "AttentionStrategy":
        """Return the strategy of a recipe."""
        return AttentionStrategy(context=p.context)

    def apply(self, p: ParallelConfig) -> ParallelConfig:
        """Return a recipe's [parallel] section with this strategy."""
        return replace(p, context=self.context)

    def describe(self) -> str:
        """Describe the strategy, such as "planned attention (documents, balanced hosts)"."""
        if not self.is_planned:
            return f"{self.context} attention"
        return f"planned attention ({self.placement}, {self.hosts} hosts)"

    @property
    def is_planned(self) -> bool:
        """True if only the needed rows of keys and values are exchanged."""
        return self.context == "planned"
