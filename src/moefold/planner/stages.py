"""Pipeline stages as the runtime would split and place them, for pricing. Torch-free.

The layers are split evenly if the chunks divide them, and balanced by FLOPs otherwise.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache

from moefold.config.parallel import ParallelConfig
from moefold.config.part import Part
from moefold.config.schema import Config
from moefold.cost.memory_columns import ModelChunk
from moefold.cost.stage_partition import fastest_stages
from moefold.cost.stages import stage_parts
from moefold.planner.model_spec import ModelSpec, feed_forward_flops, mixer_flops
from moefold.topology.pipeline_layout import StageParts, even_stages
from moefold.topology.schedules import schedule_named
from moefold.topology.selection_groups import stage_starts


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
def split_stages(model_spec: ModelSpec, num_chunks: int, seq_len: int) -> tuple[ModelChunk, ...]:
    """Split a model into chunks in model order; some are empty if there are more chunks than layers."""
    layers = len(model_spec.layers)
    bounds = (
        _even_bounds(layers, num_chunks)
        if layers % num_chunks == 0 and not model_spec.mtp_layers
        else _balanced_bounds(model_spec, num_chunks, seq_len)
    )
    last = num_chunks - 1
    return tuple(
        build_chunk(
            model_spec,
            range(bounds[i], bounds[i + 1]),
            has_embedding=i == 0,
            has_loss=i == last,
            num_mtp_layers=model_spec.mtp_layers if i == last else 0,
        )
        for i in range(num_chunks)
    )


def _even_bounds(num_layers: int, num_chunks: int) -> list[int]:
    return [i * num_layers // num_chunks for i in range(num_chunks + 1)]


def _balanced_bounds(model_spec: ModelSpec, num_chunks: int, seq_len: int) -> list[int]:
    """Return the bounds of balanced chunks, by bisection of the smallest limit under which packing fits."""
    kinds = [
        (mixer_flops(kind.mixer, seq_len, causal=True) if kind.mixer else 0.0)
        + (feed_forward_flops(kind.feed_forward, model_spec.hidden_size) if kind.feed_forward else 0.0)
        for kind in model_spec.kinds
    ]
    weights = [kinds[kind] for kind in model_spec.layers]
    head = 2.0 * model_spec.hidden_size * model_spec.vocab_size
    end = head + model_spec.mtp_layers * (kinds[model_spec.mtp_layer_kind] + head)
    low = max(max(weights), end)
    high = sum(weights) + end
    for _ in range(40):
        middle = (low + high) / 2
        if len(_pack_bounds(weights, end, middle)) - 1 <= num_chunks:
            high = middle
        else:
            low = middle
    bounds = _pack_bounds(weights, end, high * (1 + 1e-9))
    # Unused chunks stay empty at the front, where the embedding is.
    return [0] * (num_chunks + 1 - len(bounds)) + bounds


def _pack_bounds(layer_flops: list[float], end_flops: float, max_flops: float) -> list[int]:
    """Return the bounds of chunks, filled from the last layer to the first, the head's chunk first."""
    bounds = [len(layer_flops)]
    headroom = max_flops - end_flops
    for i in range(len(layer_flops) - 1, -1, -1):
        if layer_flops[i] > headroom:
            bounds.append(i + 1)
            headroom = max_flops
        headroom -= layer_flops[i]
    return [*reversed([*bounds, 0])]


StageSplitter = Callable[[int], tuple[ModelChunk, ...]]
"""Function that returns the chunks of a pipeline, in model order, from their number."""


def make_stage_splitter(model_spec: ModelSpec, seq_len: int) -> StageSplitter:
    """Return the splitter of a model without a recipe."""
    return lambda chunks: split_stages(model_spec, chunks, seq_len)


class RecipeStageSplitter:
    """Splitter by a recipe's `parallel.pipeline_layout`; without one, even if the layers divide, balanced otherwise.

    Balanced also where an even split would part layers that share a selection of keys.

    Args:
        cfg: the recipe; of its mapping only the layout counts.
        model_spec: its model.
    """

    def __init__(self, cfg: Config, model_spec: ModelSpec) -> None:
        self._cfg = cfg
        self._model_spec = model_spec
        self._cache: dict[int, tuple[ModelChunk, ...]] = {}

    def __call__(self, num_chunks: int) -> tuple[ModelChunk, ...]:
        """Return the given number of chunks."""
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
        """Return the chunks as `StageParts`; balancing uses the weights of the whole model, not of a shard."""
        cfg = self._cfg
        layout = cfg.parallel.pipeline_layout
        if not layout and not self._splits_evenly(num_chunks):
            layout = "auto"
        if layout in ("", "auto") and num_chunks == 1:
            layout = ""
        uncut = replace(cfg, parallel=ParallelConfig(world_size=num_chunks, pp=num_chunks, pipeline_layout=layout))
        return (
            fastest_stages(uncut.model, uncut.parallel, uncut.train, uncut.lora)
            if layout == "auto"
            else stage_parts(uncut)
        )

    def _splits_evenly(self, num_chunks: int) -> bool:
        model = self._cfg.model
        if model.num_layers % num_chunks or model.mtp_layers:
            return False
        return all(stage.layers.start in stage_starts(model) for stage in even_stages(model.num_layers, 0, num_chunks))


def chunks_of_rank(
    chunks: tuple[ModelChunk, ...], schedule: str | Part, pp: int, vpp: int
) -> tuple[tuple[int, ...], ...]:
    """Return the indices of each pipeline rank's chunks."""
    ranks = schedule_named(schedule).stage_ranks(pp, vpp)
    return tuple(tuple(i for i, rank in enumerate(ranks[: len(chunks)]) if rank == r) for r in range(pp))
