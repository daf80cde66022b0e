"""Pipeline stages of a recipe: the parts of the model on each stage and the pipeline rank of each. Torch-free."""

from dataclasses import dataclass

from moefold.topology.pipeline_layout import StageParts, format_layout


@dataclass(frozen=True)
class Stage:
    """One pipeline stage (model chunk); a rank has several with virtual stages."""

    number: int
    """Index in model order, from 0."""
    pp_rank: int
    parts: StageParts

    @property
    def is_first(self) -> bool:
        """Return whether the stage has the embedding."""
        return self.parts.has_embedding

    @property
    def is_last(self) -> bool:
        """Return whether the stage computes the loss (and MTP, if any)."""
        return self.parts.has_loss


@dataclass(frozen=True)
class StagePlan:
    """All stages of a recipe, in model order."""

    stages: tuple[Stage, ...]

    @property
    def layout(self) -> str:
        """Stages in the notation of `parallel.pipeline_layout`."""
        return format_layout(tuple(stage.parts for stage in self.stages))

    @property
    def ranks(self) -> tuple[int, ...]:
        """Pipeline rank of each stage."""
        return tuple(stage.pp_rank for stage in self.stages)

    @property
    def embedding_ranks(self) -> tuple[int, int]:
        """Pipeline ranks of the first and the last stage, which may hold a copy of the embedding."""
        return self.ranks[0], self.ranks[-1]

    def of_rank(self, pp_rank: int) -> tuple[Stage, ...]:
        """Return the stages of one pipeline rank."""
        return tuple(stage for stage in self.stages if stage.pp_rank == pp_rank)

    def rank_of_layers(self, num_layers: int) -> dict[int, int]:
        """Return the pipeline rank of every layer by number; MTP layers follow the `num_layers`."""
        owners = {i: stage.pp_rank for stage in self.stages for i in stage.parts.layers}
        mtp_ranks = [stage.pp_rank for stage in self.stages for _ in range(stage.parts.num_mtp_layers)]
        return owners | {num_layers + i: rank for i, rank in enumerate(mtp_ranks)}
