"""Which chunks the ranks of a pipeline hold, as the runtime would cut and place them. Torch-free."""

from collections.abc import Callable
from dataclasses import replace

from moefold.config.pipeline_layout import StageParts
from moefold.config.schedules import stage_ranks
from moefold.config.schema import Config, ParallelConfig
from moefold.parallel.stage_balance import fastest_stages
from moefold.parallel.stage_plan import stage_parts
from moefold.plan.shape import ModelShape
from moefold.plan.stage_split import Chunk, chunk_of, split_stages

Split = Callable[[int], tuple[Chunk, ...]]
"""The chunks of a pipeline of so many, in the order of the model."""


def split_of(shape: ModelShape, seq_len: int) -> Split:
    """The cut of a model of which no recipe is known."""
    return lambda chunks: split_stages(shape, chunks, seq_len)


class RecipeSplit:
    """The cut of a recipe by its `parallel.pipeline_layout`; even where layers divide, else balanced, if it has none.

    Args:
        cfg: the recipe; of its mapping only the layout counts.
        shape: its model.
    """

    def __init__(self, cfg: Config, shape: ModelShape) -> None:
        self._cfg, self._shape = cfg, shape
        self._known: dict[int, tuple[Chunk, ...]] = {}

    def __call__(self, chunks: int) -> tuple[Chunk, ...]:
        """The chunks of so many."""
        if chunks not in self._known:
            self._known[chunks] = tuple(
                chunk_of(
                    self._shape,
                    parts.layers,
                    has_embedding=parts.has_embedding,
                    has_loss=parts.has_loss,
                    num_further=parts.num_further,
                )
                for parts in self.parts(chunks)
            )
        return self._known[chunks]

    def parts(self, chunks: int) -> tuple[StageParts, ...]:
        """The same in the words of the runtime. Weights are balanced as those of the whole model, not of a shard."""
        cfg = self._cfg
        layout = cfg.parallel.pipeline_layout
        if not layout and (cfg.model.num_layers % chunks or cfg.model.mtp_layers):
            layout = "auto"
        if layout in ("", "auto") and chunks == 1:
            layout = ""
        uncut = replace(cfg, parallel=ParallelConfig(world_size=chunks, pp=chunks, pipeline_layout=layout))
        return fastest_stages(uncut) if layout == "auto" else stage_parts(uncut)


def chunks_of_rank(chunks: tuple[Chunk, ...], schedule: str, pp: int, vpp: int) -> tuple[tuple[int, ...], ...]:
    """For each pipeline rank the numbers of its chunks."""
    # The file of a schedule from one says where it has its stages; its price is that of a loop.
    name = "interleaved" if schedule == "csv" or (schedule == "1f1b" and vpp > 1) else schedule
    ranks = stage_ranks(ParallelConfig(world_size=pp, pp=pp, virtual_stages=vpp, schedule=name))  # type: ignore[arg-type]
    return tuple(tuple(i for i, rank in enumerate(ranks[: len(chunks)]) if rank == r) for r in range(pp))
