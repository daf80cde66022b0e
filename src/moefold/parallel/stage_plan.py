"""What each pipeline stage holds and which rank has it: the one place that every reader of stages asks. Torch-free."""

from dataclasses import dataclass, replace

from moefold.config.pipeline_layout import StageParts, even_stages, format_layout, parse_layout
from moefold.config.schedules import stage_ranks
from moefold.config.schema import Config
from moefold.parallel.stage_balance import balanced_stages


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


def plan_stages(cfg: Config) -> StagePlan:
    """The stages of a recipe that passed `check_config`.

    Raises:
        ConfigError: the schedule is read from a file, which cannot be read.
    """
    ranks = stage_ranks(cfg.parallel)
    parts = stage_parts(cfg)
    return StagePlan(tuple(Stage(i, rank, part) for i, (rank, part) in enumerate(zip(ranks, parts, strict=True))))


def with_explicit_layout(cfg: Config) -> Config:
    """The recipe with an automatic layout spelled out, for a change that must not move the stages."""
    if cfg.parallel.pipeline_layout != "auto":
        return cfg
    return replace(cfg, parallel=replace(cfg.parallel, pipeline_layout=plan_stages(cfg).layout))


def stage_parts(cfg: Config) -> tuple[StageParts, ...]:
    """What the stages hold, by `parallel.pipeline_layout`."""
    p, model = cfg.parallel, cfg.model
    if p.pipeline_layout == "":
        return even_stages(model.num_layers, model.mtp_layers, p.pp * p.virtual_stages)
    if p.pipeline_layout == "auto":
        return balanced_stages(cfg)
    return parse_layout(p.pipeline_layout)
