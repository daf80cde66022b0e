"""Pipeline stages as the runtime would split and place them, for pricing. Torch-free."""

from collections.abc import Callable
from functools import lru_cache

from moefold.config.parallel import ParallelConfig
from moefold.config.part import Part
from moefold.config.schema import Config
from moefold.cost.memory_columns import ModelChunk
from moefold.cost.split_units import split_units
from moefold.cost.stage_partition import fastest_stages
from moefold.planner.model_spec import ModelSpec, feed_forward_flops, mixer_flops
from moefold.topology.pipeline_layout import StageParts, parse_layout
from moefold.topology.schedules import schedule_named


def build_chunk(
    model_spec: ModelSpec, layers: range, *, has_embedding: bool, has_loss: bool, num_mtp_layers: int
) -> ModelChunk:
    """Build a chunk with a range of a model's layers."""
    counts = list(model_spec.count_kinds(layers))
    counts[model_spec.mtp_layer_kind] += num_mtp_layers
    return ModelChunk(
        tuple(counts), has_embedding, has_loss, tuple(model_spec.layers[i] for i in layers), num_mtp_layers
    )


@lru_cache(maxsize=4096)
def split_stages(
    model_spec: ModelSpec, ranks: tuple[int, ...], seq_len: int, *, as_megatron: bool = False
) -> tuple[ModelChunk, ...]:
    """Split a model without a recipe into stages in model order.

    Args:
        model_spec: the model.
        ranks: the pipeline rank of each stage.
        seq_len: tokens of a sample.
        as_megatron: as Megatron-Core does by default: even stages where the layers, or the layers, the embedding and
            the loss divide.
    """
    bounds = _unit_bounds(model_spec, ranks, seq_len, as_megatron=as_megatron)
    layers = len(model_spec.layers)
    last = len(ranks) - 1
    return tuple(
        build_chunk(
            model_spec,
            range(max(bounds[i] - 1, 0), min(bounds[i + 1] - 1, layers)),
            has_embedding=i == 0,
            has_loss=i == last,
            num_mtp_layers=model_spec.mtp_layers if i == last else 0,
        )
        for i in range(len(ranks))
    )


def _unit_bounds(model_spec: ModelSpec, ranks: tuple[int, ...], seq_len: int, *, as_megatron: bool) -> list[int]:
    """Return the bounds of the stages in the list of units: the embedding, the layers, the loss."""
    layers = len(model_spec.layers)
    stages = len(ranks)
    if as_megatron and not model_spec.mtp_layers:
        if layers % stages == 0:
            return [0, *(1 + i * layers // stages for i in range(1, stages)), layers + 2]
        if (layers + 2) % stages == 0:
            return [i * (layers + 2) // stages for i in range(stages + 1)]
    kinds = [
        (mixer_flops(kind.mixer, seq_len, causal=True) if kind.mixer else 0.0)
        + (feed_forward_flops(kind.feed_forward, model_spec.hidden_size) if kind.feed_forward else 0.0)
        for kind in model_spec.kinds
    ]
    head = 2.0 * model_spec.hidden_size * model_spec.vocab_size
    end = head + model_spec.mtp_layers * (kinds[model_spec.mtp_layer_kind] + head)
    return split_units([0.0, *(kinds[kind] for kind in model_spec.layers), end], ranks)


StageSplitter = Callable[[tuple[int, ...]], tuple[ModelChunk, ...]]
"""Function that returns the chunks of a pipeline, in model order, from the rank of each (`placed_ranks`)."""


def make_stage_splitter(model_spec: ModelSpec, seq_len: int, *, as_megatron: bool = False) -> StageSplitter:
    """Return the splitter of a model without a recipe."""
    return lambda ranks: split_stages(model_spec, ranks, seq_len, as_megatron=as_megatron)


class RecipeStageSplitter:
    """Splitter by a recipe's `parallel.pipeline_layout`; without one, balanced by rank, as the planner writes it.

    Args:
        cfg: the recipe; of its mapping only the layout counts.
        model_spec: its model.
    """

    def __init__(self, cfg: Config, model_spec: ModelSpec) -> None:
        self._cfg = cfg
        self._model_spec = model_spec
        self._cache: dict[tuple[int, ...], tuple[ModelChunk, ...]] = {}

    def __call__(self, ranks: tuple[int, ...]) -> tuple[ModelChunk, ...]:
        """Return the chunks of stages on the given ranks."""
        if ranks not in self._cache:
            self._cache[ranks] = tuple(
                build_chunk(
                    self._model_spec,
                    parts.layers,
                    has_embedding=parts.has_embedding,
                    has_loss=parts.has_loss,
                    num_mtp_layers=parts.num_mtp_layers,
                )
                for parts in self.parts(ranks)
            )
        return self._cache[ranks]

    def parts(self, ranks: tuple[int, ...]) -> tuple[StageParts, ...]:
        """Return the chunks as `StageParts`; balancing uses the weights of the whole model, not of a shard."""
        cfg = self._cfg
        layout = cfg.parallel.pipeline_layout
        if layout not in ("", "auto"):
            return parse_layout(layout)
        return fastest_stages(cfg.model, ParallelConfig(), cfg.train, cfg.lora, ranks)


def placed_ranks(schedule: str | Part, pp: int, vpp: int) -> tuple[int, ...]:
    """Return the pipeline rank of each stage, in model order; a "v" schedule has two stages on a rank."""
    return schedule_named(schedule).stage_ranks(pp, vpp)[: pp * vpp]


def chunks_of_rank(
    chunks: tuple[ModelChunk, ...], schedule: str | Part, pp: int, vpp: int
) -> tuple[tuple[int, ...], ...]:
    """Return the indices of each pipeline rank's chunks."""
    ranks = schedule_named(schedule).stage_ranks(pp, vpp)
    return tuple(tuple(i for i, rank in enumerate(ranks[: len(chunks)]) if rank == r) for r in range(pp))
