"""Layers of a model as objects.

Only `layers_of` reads the words and the parts of a recipe. The interface of the parts of a layer is in
`config/groups/`.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

from moefold.config.base.layer_words import LayerWords
from moefold.config.base.param_spec import ParamSpec
from moefold.config.base.part import make_part, metadata_of
from moefold.config.base.part_registry import unknown_kind
from moefold.config.groups.attention import AttentionCore, AttentionPart, prefixed
from moefold.config.groups.block import NormPart, ResidualPart
from moefold.config.groups.ffn import FeedForwardPart
from moefold.errors import ConfigError

LAYER_KEYS = (
    "model.attention", "model.linear_attention", "model.norm", "model.residual", "model.mtp_layers", "model.layers",
    "model.sliding_window", "model.attention_chunk_size", "model.ffn.dense", "model.ffn.moe",
)  # fmt: skip
"""Recipe keys that choose the parts of the layers."""
SPANS = {"window": "sliding_window", "chunk": "attention_chunk_size"}
"""Key with the number of tokens of each kind of span."""


@dataclass(frozen=True, kw_only=True)
class Layer:
    """Transformer layer: attention, then a feed-forward network, each added to the residual stream."""

    hidden_size: int
    attention: AttentionPart
    ffn: FeedForwardPart
    norm: NormPart
    """Norm of the residual stream."""
    residual: ResidualPart

    def __hash__(self) -> int:
        """Return the cached hash, because layers are keys of dictionaries."""
        return self._hash

    def __getstate__(self) -> dict[str, Any]:
        """Return the fields without the hash, because hashes of strings differ between processes."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @cached_property
    def _hash(self) -> int:
        return hash(tuple(self.__getstate__().values()))

    @cached_property
    def params(self) -> tuple[ParamSpec, ...]:
        """Unsharded parameters, by their names in the layer and in the order of the module."""
        return (
            *self._norm_params("attention_norm", self.residual.norms_input),
            *prefixed("attention", self.attention.params(self.hidden_size)),
            *self._norm_params("attention_output_norm", self.residual.norms_output),
            *self._norm_params("ffn_norm", self.residual.norms_input),
            *prefixed("ffn", self.ffn.params(self.hidden_size)),
            *self._norm_params("ffn_output_norm", self.residual.norms_output),
        )

    @cached_property
    def core(self) -> AttentionCore:
        """Core of attention: the sizes of its computation without weights."""
        return self.attention.core(self.hidden_size)

    def _norm_params(self, name: str, exists: bool) -> Iterator[ParamSpec]:
        return self.norm.params(name, self.hidden_size) if exists else iter(())

    @cached_property
    def kind(self) -> "Layer":
        """Layer without the parts that depend on positions: span and RoPE.

        Layers of one kind have the same parameters, FLOPs for each key, saved bytes and cache. They share one object.
        """
        return _interned(replace(self, attention=replace(self.attention, span=None, has_rope=True)))

    def parts(self) -> Iterator[Any]:
        """Yield the parts of the layer, recursively."""
        yield self.norm
        yield self.residual
        for part in (self.attention, self.ffn):
            yield part
            yield from (value for field in fields(part) if is_dataclass(value := getattr(part, field.name)))

    @property
    def window(self) -> int:
        """Sliding window in tokens. 0 means none."""
        return self.attention.window

    @property
    def chunk(self) -> int:
        """Attention chunk in tokens. 0 means none."""
        return self.attention.span.chunk if self.attention.span else 0


@lru_cache(maxsize=1024)
def _interned(layer: Layer) -> Layer:
    return layer


def layers_of(model: Any) -> tuple[Layer, ...]:
    """Return the layers of a model in order, then the MTP (multi-token prediction) layers.

    An MTP layer is like the last layer, with its own indexer.

    Args:
        model: a `ModelConfig`, which has the layers as `all_layers`.

    Raises:
        ValueError: `model.layers` is not valid.
    """
    rows = list(model.layer_words)
    rows += [rows[-1]._replace(selection="own")] * model.mtp_layers
    for key in ("attention", "linear_attention", "norm", "residual"):
        if isinstance(kind := getattr(model, key), str):
            owner: Any = type(model)
            [annotation] = metadata_of(owner)[key]
            raise ConfigError(unknown_kind(f"model.{key}", annotation.group, kind, annotation.kinds))
    built = {
        row: Layer(
            hidden_size=model.hidden_size,
            attention=_attention(model, row),
            ffn=getattr(model.ffn, row.ffn),
            norm=model.norm,
            residual=model.residual,
        )
        for row in dict.fromkeys(rows)
    }
    return tuple(built[row] for row in rows)


def _attention(model: Any, words: LayerWords) -> AttentionPart:
    if words.attention == "linear":
        linear: AttentionPart = model.linear_attention
        return linear
    key = SPANS.get(words.attention)
    span = make_part("span", words.attention, tokens=getattr(model, key)) if key else None
    part: AttentionPart = replace(model.softmax_attention, span=span, has_rope=words.position == "rope")
    return part if words.selection == "own" else part.with_shared_selection()
