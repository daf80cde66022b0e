"""Which layers stand on which chunk of a pipeline, for pricing: even where they divide, else balanced by operations."""

from dataclasses import dataclass
from functools import lru_cache

from moefold.plan.flop_count import feed_forward_flops, mixer_flops
from moefold.plan.shape import ModelSpec


@dataclass(frozen=True, slots=True)
class ModelChunk:
    """What one model chunk holds."""

    kind_counts: tuple[int, ...]
    """Layers of each kind, those of multi-token prediction included."""
    has_embedding: bool
    has_loss: bool
    kinds: tuple[int, ...] = ()
    """Of its layers in order, without those of multi-token prediction."""
    num_mtp_layers: int = 0
    """Layers of multi-token prediction."""

    @property
    def mtp_layer_kind(self) -> int:
        """The kind of those; asked for where there are any."""
        return next(kind for kind, count in enumerate(self.kind_counts) if count > self.kinds.count(kind))


def build_chunk(
    model_spec: ModelSpec, layers: range, *, has_embedding: bool, has_loss: bool, num_mtp_layers: int
) -> ModelChunk:
    """A chunk with some layers of a model."""
    counts = list(model_spec.count_kinds(layers))
    counts[model_spec.mtp_layer_kind] += num_mtp_layers
    return ModelChunk(
        tuple(counts), has_embedding, has_loss, tuple(model_spec.layers[i] for i in layers), num_mtp_layers
    )


@lru_cache(maxsize=4096)
def split_stages(model_spec: ModelSpec, num_chunks: int, seq_len: int) -> tuple[ModelChunk, ...]:
    """The chunks in the order of the model; some may hold no layer where there are more chunks than layers."""
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
    """Bounds that keep the heaviest chunk light: the least limit under which the layers, packed in order, fit."""
    kinds = [
        (mixer_flops(kind.mixer, seq_len, causal=True) if kind.mixer else 0.0)
        + (feed_forward_flops(kind.feed_forward, model_spec.hidden_size) if kind.feed_forward else 0.0)
        for kind in model_spec.kinds
    ]
    weights = [kinds[kind] for kind in model_spec.layers]
    head = 2.0 * model_spec.hidden_size * model_spec.vocab_size
    end = head + model_spec.mtp_layers * (kinds[model_spec.mtp_layer_kind] + head)
    low, high = max(max(weights), end), sum(weights) + end
    for _ in range(40):
        middle = (low + high) / 2
        if len(_pack_bounds(weights, end, middle)) - 1 <= num_chunks:
            high = middle
        else:
            low = middle
    bounds = _pack_bounds(weights, end, high * (1 + 1e-9))
    # Chunks that packing left over stay empty at the front, where the embedding is.
    return [0] * (num_chunks + 1 - len(bounds)) + bounds


def _pack_bounds(layer_flops: list[float], end_flops: float, max_flops: float) -> list[int]:
    """Bounds of chunks, filled from the last layer to the first, the head's chunk first."""
    bounds, room = [len(layer_flops)], max_flops - end_flops
    for i in range(len(layer_flops) - 1, -1, -1):
        if layer_flops[i] > room:
            bounds.append(i + 1)
            room = max_flops
        room -= layer_flops[i]
    return [*reversed([*bounds, 0])]
