"""."""

from dataclasses import dataclass

from moefold.topology.pipeline_layout import StageParts, format_layout


@dataclass(frozen=True)
class Stage:
    """One pipeline stage, a chunk of a rank's where there are virtual ones."""

    number: int
    """Place in the order of the model, from 0."""
    pp_rank: int
    parts: StageParts

    @property
    def is_first(self) -> bool:
        """Whether tokens enter here."""
        return self.parts.has_embedding

    @property
    def is_last(self) -> bool:
        """Whether the loss is computed here, and further tokens are predicted."""
        return self.parts.has_loss


@dataclass(frozen=True)
class StagePlan:
    """All stages of a recipe, in the order of the model."""

    stages: tuple[Stage, ...]

    @property
    def layout(self) -> str:
        """As `parallel.pipeline_layout` spells it."""
        return format_layout(tuple(stage.parts for stage in self.stages))

    @property
    def ranks(self) -> tuple[int, ...]:
        """Pipeline rank of each stage."""
        return tuple(stage.pp_rank for stage in self.stages)

    @property
    def embedding_ranks(self) -> tuple[int, int]:
        """The pipeline ranks of the first stage and of the last, which may hold a copy of the embedding."""
        return self.ranks[0], self.ranks[-1]

    def of_rank(self, pp_rank: int) -> tuple[Stage, ...]:
        """The stages of one pipeline rank."""
        return tuple(stage for stage in self.stages if stage.pp_rank == pp_rank)

    def rank_of_layers(self, num_layers: int) -> dict[int, int]:
        """The pipeline rank of every layer by its number, those of multi-token prediction behind the `num_layers`."""
        owners = {i: stage.pp_rank for stage in self.stages for i in stage.parts.layers}
        further = [stage.pp_rank for stage in self.stages for _ in range(stage.parts.num_mtp_layers)]
        return owners | {num_layers + i: rank for i, rank in enumerate(further)}
