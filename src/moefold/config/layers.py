"""Layers of a model as objects: `layers_of` reads the patterns and the kinds of a recipe, and nothing else does.

What is asked of a layer is asked of its parts, in `config/groups/`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

from moefold.config.find import unknown_kind
from moefold.config.groups.attention import AttentionPart, RecurrentCore, SoftmaxAttentionPart, SoftmaxCore, prefixed
from moefold.config.groups.block import NormPart, ResidualPart
from moefold.config.groups.ffn import FeedForwardPart
from moefold.config.param_spec import ParamSpec
from moefold.config.part import make_part, marks_of, names_failure
from moefold.config.patterns import ATTENTION_KINDS, INDEX_KINDS, LAYER_KINDS, PATTERNS, ROPE_KINDS, spell
from moefold.errors import ConfigError

LAYER_KEYS = (
    "model.attention", "model.linear_attention", "model.norm", "model.residual", "model.mtp_layers",
    "model.layer_pattern", "model.attention_pattern", "model.rope_pattern", "model.index_pattern",
    "model.sliding_window", "model.attention_chunk_size", "model.ffn.dense", "model.ffn.moe",
)  # fmt: skip
"""Recipe keys that choose the parts of the layers."""
SPANS = {"W": ("window", "sliding_window"), "C": ("chunk", "attention_chunk_size")}
"""Kind of the span of a letter of `model.attention_pattern`, and the key with its tokens."""
NETWORKS = {"D": "dense", "M": "moe"}
"""Feed-forward network of a letter of `model.layer_pattern`, as `model.ffn` names it."""


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
        """Return the hash, which is computed once: layers are keys of dictionaries."""
        return self._hash

    def __getstate__(self) -> dict[str, Any]:
        """Return the fields: hashes of strings differ between processes."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @cached_property
    def _hash(self) -> int:
        return hash(tuple(self.__getstate__().values()))

    @cached_property
    def params(self) -> tuple[ParamSpec, ...]:
        """Unsharded parameters, by their names in the layer and in the order of the module."""
        with names_failure(self.attention, "params"):
            of_attention = tuple(self.attention.params(self.hidden_size))
        return (
            *self._norm_params("attention_norm", self.residual.norms_input),
            *prefixed("attention", of_attention),
            *self._norm_params("attention_output_norm", self.residual.norms_output),
            *self._norm_params("ffn_norm", self.residual.norms_input),
            *prefixed("ffn", self.ffn.params(self.hidden_size)),
            *self._norm_params("ffn_output_norm", self.residual.norms_output),
        )

    @cached_property
    def core(self) -> SoftmaxCore | RecurrentCore:
        """Core of attention: what it computes without a weight."""
        with names_failure(self.attention, "core"):
            return self.attention.core(self.hidden_size)

    def _norm_params(self, name: str, exists: bool) -> Iterator[ParamSpec]:
        return self.norm.params(name, self.hidden_size) if exists else iter(())

    @cached_property
    def kind(self) -> "Layer":
        """The layer without what depends on positions, span and RoPE.

        Layers of one kind have the same parameters, FLOPs for each key, saved bytes and cache. It is the same object
        for all of them.
        """
        return _interned(replace(self, attention=replace(self.attention, span=None, has_rope=True)))

    def parts(self) -> Iterator[Any]:
        """Yield the parts of the layer, and their parts."""
        yield self.norm
        yield self.residual
        for part in (self.attention, self.ffn):
            yield part
            yield from (value for field in fields(part) if is_dataclass(value := getattr(part, field.name)))

    @property
    def window(self) -> int:
        """Sliding window in tokens; 0: none."""
        return self.attention.window

    @property
    def chunk(self) -> int:
        """Attention chunk in tokens; 0: none."""
        return self.attention.span.chunk if self.attention.span else 0


@lru_cache(maxsize=1024)
def _interned(layer: Layer) -> Layer:
    return layer


def layers_of(model: Any) -> tuple[Layer, ...]:
    """Return the layers of a model in order, then the MTP (multi-token prediction) layers.

    An MTP layer is as the last one, with an indexer of its own.

    Args:
        model: a `ModelConfig`, which has the layers as `all_layers`.

    Raises:
        ValueError: a pattern is not valid.
    """
    spelled = (spell(getattr(model, name), letters, model.num_layers) for name, letters in PATTERNS.items())
    rows = list(zip(*spelled, strict=True))
    rows += [(*rows[-1][:3], INDEX_KINDS[0])] * model.mtp_layers
    for key in ("attention", "linear_attention", "norm", "residual"):
        if isinstance(kind := getattr(model, key), str):
            owner: Any = type(model)
            [mark] = marks_of(owner)[key]
            raise ConfigError(unknown_kind(f"model.{key}", mark.group, kind, mark.words))
    built = {
        row: Layer(
            hidden_size=model.hidden_size,
            attention=_attention(model, row[1], has_rope=row[2] == "R", is_shared=row[3] == "S"),
            ffn=getattr(model.ffn, NETWORKS[row[0]]),
            norm=model.norm,
            residual=model.residual,
        )
        for row in dict.fromkeys(rows)
    }
    return tuple(built[row] for row in rows)


def with_layers_of(model: Any, attentions: Sequence[int], networks: Sequence[int], shares: Sequence[bool]) -> Any:
    """Return a model of some of its layers, as patterns.

    Args:
        model: a `ModelConfig`.
        attentions: number of the layer whose attention each layer has, in order.
        networks: number of the layer whose feed-forward network it has.
        shares: whether it attends to the keys that an earlier layer selected.
    """

    def letters(pattern: str, kinds: str, numbers: Sequence[int]) -> str:
        spelled = spell(pattern, kinds, model.num_layers)
        return "".join(spelled[number] for number in numbers)

    return replace(
        model,
        layer_pattern=letters(model.layer_pattern, LAYER_KINDS, networks),
        attention_pattern=letters(model.attention_pattern, ATTENTION_KINDS, attentions),
        rope_pattern=letters(model.rope_pattern, ROPE_KINDS, attentions),
        index_pattern="".join(INDEX_KINDS[is_shared] for is_shared in shares) if any(shares) else INDEX_KINDS[0],
        num_layers=len(attentions),
    )


def _attention(model: Any, letter: str, *, has_rope: bool, is_shared: bool) -> AttentionPart:
    """Return the attention of a layer with a letter of `model.attention_pattern`."""
    if letter == "L":
        linear: AttentionPart = model.linear_attention
        return linear
    kind, key = SPANS.get(letter, ("", ""))
    span = make_part("span", kind, tokens=getattr(model, key)) if kind else None
    part: AttentionPart = replace(model.softmax_attention, span=span, has_rope=has_rope)
    if not isinstance(part, SoftmaxAttentionPart) or part.indexer is None or not is_shared:
        return part
    sizes = {field.name: getattr(part.indexer, field.name) for field in fields(part.indexer)}
    return replace(part, indexer=make_part("indexer", "shared", **sizes))
