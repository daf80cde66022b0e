"""Which layers stand on which chunk of a pipeline, for pricing: even where they divide, else balanced by operations."""

from dataclasses import dataclass
from functools import lru_cache

from moefold.plan.flop_count import feed_forward_flops, mixer_flops
from moefold.plan.shape import ModelShape


@dataclass(frozen=True, slots=True)
class Chunk:
    """What one model chunk holds."""

    counts: tuple[int, ...]
    """Layers of each kind, those of multi-token prediction included."""
    has_embedding: bool
    has_loss: bool
    kinds: tuple[int, ...] = ()
    """Of its layers in order, without those of multi-token prediction."""
    num_further: int = 0
    """Layers of multi-token prediction."""

    @property
    def further_kind(self) -> int:
        """The kind of those; asked for where there are any."""
        return next(kind for kind, count in enumerate(self.counts) if count > self.kinds.count(kind))


def chunk_of(shape: ModelShape, layers: range, *, has_embedding: bool, has_loss: bool, num_further: int) -> Chunk:
    """A chunk with some layers of a model."""
    counts = list(shape.counts(layers))
    counts[shape.further_kind] += num_further
    return Chunk(tuple(counts), has_embedding, has_loss, tuple(shape.layers[i] for i in layers), num_further)


@lru_cache(maxsize=4096)
def split_stages(shape: ModelShape, chunks: int, seq_len: int) -> tuple[Chunk, ...]:
    """The chunks in the order of the model; some may hold no layer where there are more chunks than layers."""
    layers = len(shape.layers)
    bounds = (
        _even(layers, chunks) if layers % chunks == 0 and not shape.mtp_layers else _balanced(shape, chunks, seq_len)
    )
    last = chunks - 1
    return tuple(
        chunk_of(
            shape,
            range(bounds[i], bounds[i + 1]),
            has_embedding=i == 0,
            has_loss=i == last,
            num_further=shape.mtp_layers if i == last else 0,
        )
        for i in range(chunks)
    )


def _even(layers: int, chunks: int) -> list[int]:
    return [i * layers // chunks for i in range(chunks + 1)]


def _balanced(shape: ModelShape, chunks: int, seq_len: int) -> list[int]:
    """Bounds that keep the heaviest chunk light: the least limit under which the layers, packed in order, fit."""
    kinds = [
        (mixer_flops(kind.mixer, seq_len, causal=True) if kind.mixer else 0.0)
        + (feed_forward_flops(kind.feed_forward, shape.hidden_size) if kind.feed_forward else 0.0)
        for kind in shape.kinds
    ]
    weights = [kinds[kind] for kind in shape.layers]
    head = 2.0 * shape.hidden_size * shape.vocab_size
    end = head + shape.mtp_layers * (kinds[shape.further_kind] + head)
    low, high = max(max(weights), end), sum(weights) + end
    for _ in range(40):
        middle = (low + high) / 2
        if len(_pack(weights, end, middle)) - 1 <= chunks:
            high = middle
        else:
            low = middle
    bounds = _pack(weights, end, high * (1 + 1e-9))
    # Chunks that packing left over stay empty at the front, where the embedding is.
    return [0] * (chunks + 1 - len(bounds)) + bounds


def _pack(weights: list[float], end: float, limit: float) -> list[int]:
    """Bounds of chunks, filled from the last layer to the first, the head's chunk first."""
    bounds, room = [len(weights)], limit - end
    for i in range(len(weights) - 1, -1, -1):
        if weights[i] > room:
            bounds.append(i + 1)
            room = limit
        room -= weights[i]
    return [*reversed([*bounds, 0])]
