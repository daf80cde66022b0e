"""Groups of layers on one pipeline stage: of one selection of keys, or joined by a shortcut."""

from functools import lru_cache

from moefold.config.model import ModelConfig


def shares_selections(model: ModelConfig) -> bool:
    """Return whether some layers attend to the keys that an earlier layer selected."""
    return any(layer.attention.shares_selection for layer in model.decoder_layers)


@lru_cache(maxsize=256)
def selection_sources(model: ModelConfig) -> tuple[int, ...]:
    """Return the layer that selects the keys of each layer, in order, MTP (multi-token prediction) layers included.

    A layer with an indexer, or without sparse attention, has its own number.
    """
    sources: list[int] = []
    last = 0
    for number, layer in enumerate(model.all_layers):
        is_shared = layer.attention.shares_selection
        last = last if is_shared or layer.attention.is_recurrent else number
        sources.append(last if is_shared else number)
    return tuple(sources)


@lru_cache(maxsize=256)
def stage_starts(model: ModelConfig) -> tuple[int, ...]:
    """Return the layers at which a pipeline stage may begin without splitting a group, and the number of layers.

    With `model.ffn.moe.shortcut` a layer with experts and the next layer are a group too.
    """
    starts = [model.num_layers]
    earliest = model.num_layers
    sources = selection_sources(model)
    for number in range(model.num_layers - 1, -1, -1):
        earliest = min(earliest, sources[number])
        if earliest == number and not (
            number and model.has_shortcut and model.decoder_layers[number - 1].ffn.is_routed
        ):
            starts.append(number)
    return tuple(reversed(starts))
