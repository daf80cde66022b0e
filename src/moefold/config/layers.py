"""Layers of a model as objects: `layers_of` reads the patterns and the kinds of a recipe, and nothing else does.

What is asked of a layer is asked of its parts, in `config/groups/`.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from difflib import get_close_matches
from functools import cached_property, lru_cache
from typing import Any

from moefold.config.find import built_in_kinds, kinds, unknown_kind
from moefold.config.groups.attention import (
    AttentionPart,
    OutputGate,
    QueryKeyNorm,
    RecurrentCore,
    SoftmaxAttentionPart,
    SoftmaxCore,
    prefixed,
)
from moefold.config.groups.block import NormPart, ResidualPart
from moefold.config.groups.ffn import FeedForwardPart
from moefold.config.groups.rope_scaling import RopeSettings
from moefold.config.param_spec import ParamSpec
from moefold.config.part import Part, build_part, flat_keys, key_name, marks_of, names_failure
from moefold.config.patterns import ATTENTION_KINDS, INDEX_KINDS, LAYER_KINDS, PATTERNS, ROPE_KINDS, spell
from moefold.errors import ConfigError

LAYER_KEYS = (
    "model.attention", "model.linear_attention", "model.norm", "model.mtp_layers", "model.layer_pattern",
    "model.attention_pattern", "model.rope_pattern", "model.index_pattern", "model.qk_norm", "model.attention_gate",
    "model.norm_placement",
)  # fmt: skip
"""Recipe keys that choose the parts of the layers."""
SPANS = {"W": "window", "C": "chunk"}
"""Kind of the span of a letter of `model.attention_pattern`."""
NORM_WIDTHS = {"head": False, "all_heads": True}
"""Whether norms are over all heads, by `model.qk_norm_width`."""
GATE_WIDTHS = {"dim": False, "head": True}
"""Whether a gate belongs to a whole head, by `model.attention_gate_width`."""
FEED_FORWARD_KINDS = {"D": "swiglu", "M": "moe"}
"""Kind of the feed-forward network of a letter of `model.layer_pattern`."""


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
    norm = _chosen_part(model, "norm", "norm")
    residual = _flat_part(model, "residual", model.norm_placement)
    built = {
        row: Layer(
            hidden_size=model.hidden_size,
            attention=_attention(model, row[1], has_rope=row[2] == "R", is_shared=row[3] == "S"),
            ffn=_flat_part(model, "ffn", FEED_FORWARD_KINDS[row[0]]),
            norm=norm,
            residual=residual,
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


def built_in_parts(model: Any, group: str) -> Iterator[Any]:
    """Yield the part of each built-in kind of a group, whether a layer of the model has it or not."""
    return (_flat_part(model, group, kind) for kind in built_in_kinds(group))


def softmax_attention(model: Any) -> Any:
    """Return `model.attention` with resolved widths, without what differs between layers: span, RoPE and indexer."""
    part = _chosen_part(model, "attention", "attention")
    if not isinstance(part, SoftmaxAttentionPart):
        return part
    gate = OutputGate(per_head=_by_word(model, "attention_gate_width", GATE_WIDTHS)) if model.attention_gate else None
    return replace(part.with_heads(model.hidden_size, _qk_norm(model)), gate=gate)


def rope_of(model: Any) -> RopeSettings:
    """Return the RoPE of a model, which has it as `rope`."""
    return RopeSettings(
        theta=model.rope_theta,
        rotary_dim=int(model.softmax_attention.rotary_dim),
        interleaved=model.rope_interleaved,
        scaling=_chosen_part(model, "rope_scaling", "rope_scaling"),
        temperature_scale=model.nope_temperature_scale,
        temperature_tokens=model.nope_temperature_tokens,
    )


def _attention(model: Any, letter: str, *, has_rope: bool, is_shared: bool) -> AttentionPart:
    """Return the attention of a layer with a letter of `model.attention_pattern`."""
    if letter == "L":
        linear: AttentionPart = _chosen_part(model, "attention", "linear_attention")
        return linear
    span = _flat_part(model, "span", SPANS[letter]) if letter in SPANS else None
    part: AttentionPart = replace(model.softmax_attention, span=span, has_rope=has_rope)
    if not isinstance(part, SoftmaxAttentionPart) or not model.index_topk:
        return part
    return replace(part, indexer=_flat_part(model, "indexer", "shared" if is_shared else "lightning"))


def _qk_norm(model: Any) -> QueryKeyNorm | None:
    """Return the norms of queries and keys."""
    if not model.qk_norm:
        return None
    return QueryKeyNorm(
        over_all_heads=_by_word(model, "qk_norm_width", NORM_WIDTHS),
        after_rope=model.qk_norm_after_rope,
        has_weight=model.qk_norm_weight,
        in_nope=model.qk_norm_nope,
    )


def _by_word(model: Any, key: str, values: Mapping[str, bool]) -> bool:
    """Return what a word of a key stands for.

    Raises:
        ConfigError: it is none of the words, in a model that a program made.
    """
    word = getattr(model, key)
    if word in (words := list(values)):
        return values[word]
    guess = "".join(f"; did you mean {guess!r}?" for guess in get_close_matches(str(word), words, n=1))
    raise ConfigError(f"model.{key}={word!r} must be one of {', '.join(map(repr, words))}{guess}")


def _chosen_part(model: Any, group: str, key: str) -> Any:
    """Return the part of a key of a model; a part that the recipe gives as a table as it is."""
    kind = getattr(model, key)
    if isinstance(kind, Part):
        return kind
    if kind not in kinds(group):
        owner: Any = type(model)
        [mark] = marks_of(owner)[key]
        raise ConfigError(unknown_kind(f"model.{key}", group, kind, mark.words))
    return _flat_part(model, group, kind)


def _flat_part(model: Any, group: str, kind: str | Part) -> Any:
    """Return a part of a kind with the flat keys of a model; a part that the recipe gives as a table as it is."""
    if isinstance(kind, Part):
        return kind
    values = []
    for _, key in flat_keys(group, kind):
        value = getattr(model, key_name(key).removeprefix("model."))
        values.append(value if isinstance(key, str) else _flat_part(model, key.group, value))
    return build_part(group, kind, tuple(values))
