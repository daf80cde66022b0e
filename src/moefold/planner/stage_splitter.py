"""Pipeline stages as the runtime would split and place them, for pricing."""

from collections.abc import Callable

from moefold.config.base.part import Part
from moefold.config.schema import Config
from moefold.cost.memoised import all_arguments, memoised
from moefold.cost.memory_columns import ModelChunk, chunk_of
from moefold.cost.stage_balance import split_model, stages_between
from moefold.planner.model_spec import ModelSpec
from moefold.topology.pipeline_layout import StageParts, parse_layout
from moefold.topology.schedules import schedule_named

StageSplitter = Callable[[tuple[int, ...]], tuple[ModelChunk, ...]]
"""Function from the rank of each chunk of a pipeline (`placed_ranks`) to the chunks, in model order."""


class RecipeStageSplitter:
    """Splitter by a recipe's `parallel.pipeline_layout`, or without one balanced by rank, as the planner writes it.

    Args:
        cfg: the recipe. From its mapping only the layout is read.
        as_megatron: split as Megatron-Core does by default: into even stages, if they divide the layers, or the layers
            with the embedding and the loss.
    """

    def __init__(self, cfg: Config, model_spec: ModelSpec, *, as_megatron: bool = False) -> None:
        self._cfg = cfg
        self._model_spec = model_spec
        self._as_megatron = as_megatron

    @memoised(all_arguments)
    def __call__(self, ranks: tuple[int, ...]) -> tuple[ModelChunk, ...]:
        """Return the chunks of stages on the given ranks."""
        return tuple(chunk_of(self._model_spec.all_layers, parts) for parts in self.parts(ranks))

    def parts(self, ranks: tuple[int, ...]) -> tuple[StageParts, ...]:
        """Return the chunks as `StageParts`. Balancing uses the weights of the whole model, not of a shard."""
        cfg = self._cfg
        layout = cfg.parallel.pipeline_layout
        if layout not in ("", "auto"):
            return parse_layout(layout)
        bounds = self._even_bounds(len(ranks)) if self._as_megatron and not cfg.model.mtp_layers else []
        if bounds:
            return stages_between(cfg.model, bounds)
        return split_model(cfg.model, cfg.train, cfg.lora, ranks)

    def _even_bounds(self, stages: int) -> list[int]:
        """Return the bounds of even stages in the list of units: the embedding, the layers, the loss. Empty: none."""
        layers = self._cfg.model.num_layers
        if layers % stages == 0:
            return [0, *(1 + i * layers // stages for i in range(1, stages)), layers + 2]
        return [i * (layers + 2) // stages for i in range(stages + 1)] if (layers + 2) % stages == 0 else []


def placed_ranks(schedule: str | Part, pp: int, vpp: int) -> tuple[int, ...]:
    """Return the pipeline rank of each stage, in model order. A "v" schedule has two stages on a rank."""
    return schedule_named(schedule).stage_ranks(pp, vpp)[: pp * vpp]


def stages_by_rank(ranks: tuple[int, ...]) -> list[list[int]]:
    """Return the indices of each pipeline rank's stages, from the rank of each stage."""
    return [[i for i, rank in enumerate(ranks) if rank == own] for own in range(max(ranks) + 1)]
