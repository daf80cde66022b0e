"""Which chunks the ranks of a pipeline hold, as the runtime would cut and place them. Torch-free."""

from collections.abc import Callable
from dataclasses import replace

from moefold.config.pipeline_layout import StageParts
from moefold.config.schedules import stage_ranks
from moefold.config.schema import Config, ParallelConfig
from moefold.parallel.stage_balance import fastest_stages
from moefold.parallel.stage_plan import stage_parts
from moefold.plan.shape import ModelSpec
from moefold.plan.stage_split import ModelChunk, build_chunk, split_stages

StageSplitter = Callable[[int], tuple[ModelChunk, ...]]
"""The chunks of a pipeline of so many, in the order of the model."""


def make_stage_splitter(model_spec: ModelSpec, seq_len: int) -> StageSplitter:
    """The cut of a model of which no recipe is known."""
    return lambda chunks: split_stages(model_spec, chunks, seq_len)


class RecipeStageSplitter:
    """The cut of a recipe by its `parallel.pipeline_layout`; even where layers divide, else balanced, if it has none.

    Args:
        cfg: the recipe; of its mapping only the layout counts.
        model_spec: its model.
    """

    def __init__(self, cfg: Config, model_spec: ModelSpec) -> None:
        self._cfg, self._model_spec = cfg, model_spec
        self._cache: dict[int, tuple[ModelChunk, ...]] = {}

    def __call__(self, num_chunks: int) -> tuple[ModelChunk, ...]:
        """The chunks of so many."""
        if num_chunks not in self._cache:
            self._cache[num_chunks] = tuple(
                build_chunk(
                    self._model_spec,
                    parts.layers,
                    has_embedding=parts.has_embedding,
                    has_loss=parts.has_loss,
                    num_mtp_layers=parts.num_mtp_layers,
                )
                for parts in self.parts(num_chunks)
            )
        return self._cache[num_chunks]

    def parts(self, num_chunks: int) -> tuple[StageParts, ...]:
        """The same in the words of the runtime. Weights are balanced as those of the whole model, not of a shard."""
        cfg = self._cfg
        layout = cfg.parallel.pipeline_layout
        if not layout and (cfg.model.num_layers % num_chunks or cfg.model.mtp_layers):
            layout = "auto"
        if layout in ("", "auto") and num_chunks == 1:
            layout = ""
        uncut = replace(cfg, parallel=ParallelConfig(world_size=num_chunks, pp=num_chunks, pipeline_layout=layout))
        return fastest_stages(uncut) if layout == "auto" else stage_parts(uncut)


def chunks_of_rank(chunks: tuple[ModelChunk, ...], schedule: str, pp: int, vpp: int) -> tuple[tuple[int, ...], ...]:
    """For each pipeline rank the numbers of its chunks."""
    # The file of a schedule from one says where it has its stages; its price is that of a loop.
    name = "interleaved" if schedule == "csv" or (schedule == "1f1b" and vpp > 1) else schedule
    ranks = stage_ranks(ParallelConfig(world_size=pp, pp=pp, virtual_stages=vpp, schedule=name))  # type: ignore[arg-type]
    return tuple(tuple(i for i, rank in enumerate(ranks[: len(chunks)]) if rank == r) for r in range(pp))
