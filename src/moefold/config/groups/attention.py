"""Attention of a layer, softmax or linear: its parameters, its computation without weights, and its cache."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NamedTuple, Self

from moefold.config.base.field import POSITIVE, MaxMagnitude, at_least
from moefold.config.base.limits import MAX_WIDTH
from moefold.config.base.param_spec import Distribution, ParamSpec
from moefold.config.base.part import KindOf, Part, Table, make_part
from moefold.config.groups.indexer import IndexerPart

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module

    from moefold.config.base.small_sizes import SmallSizes
    from moefold.config.groups.layer_sizes import LayerSizes


LinearFormula = Callable[[Mapping[str, "Tensor"], "Tensor", float], "Tensor"]
"""Formula of a layer without softmax: weights by name, the normalised hidden states of one document [S, H] and the
epsilon of norms -> its output [S, H]."""


class SoftmaxInput(NamedTuple):
    """Input of the formula of softmax attention: a micro-batch of B samples of S tokens, in float64."""

    weights: "Mapping[str, Tensor]"
    """Weights by their names in the module."""
    x: "Tensor"
    """Normalised hidden states, [B, S, H]."""
    rotate: "Callable[[Tensor, int], Tensor]"
    """RoPE over a number of first dims of heads [B, S, heads, D]. In a layer without RoPE it is the identity."""
    norm: "Callable[..., Tensor]"
    """RMSNorm over the last dim with the recipe's epsilon, given the numbers and an optional weight."""
    score_factor: float
    """Factor of the scores of latent attention that comes from the scaling of RoPE. 1: none."""
    positions: "Tensor"
    """Positions of the tokens in their documents, [B, S]."""


class SoftmaxHeads(NamedTuple):
    """Result of the formula of softmax attention. The oracle applies the mask, the softmax and `wo`."""

    queries: "Tensor"
    """[B, S, A, D]."""
    keys: "Tensor"
    """[B, S, G, D], where G divides A."""
    values: "Tensor"
    """[B, S, G, Dv]."""
    scale: float
    """Factor of the scores."""
    gates: "Tensor | None" = None
    """Factors of the output of the heads, [B, S, A, Dv or 1]. None: 1."""
    sinks: "Tensor | None" = None
    """Score of each head's sink, [A], or None if there are no sinks."""
    bias: "Tensor | None" = None
    """Bias of the output, [H]. None: 0."""
    index_source: "Tensor | None" = None
    """Input of the projection to the indexer's queries, [B, S, ...]. None: x."""


SoftmaxFormula = Callable[[SoftmaxInput], SoftmaxHeads]


@dataclass(frozen=True, kw_only=True)
class AttentionCore:
    """Sizes of attention without its weights, for FLOPs, caches and exchanges between ranks.

    Softmax attention has heads and a KV cache. A recurrence or a convolution has states of a fixed size instead.
    """

    heads: int = 0
    """Query heads. 0: no softmax attention."""
    kv_heads: int = 0
    """Heads of keys and values in the core."""
    key_width: int = 0
    """Width of a query and key head."""
    value_width: int = 0
    """Width of a value head."""
    cached_heads: int = 0
    """Heads of keys and values in the cache, which tensor parallelism shards. With more ranks than heads each rank has
    one head. 0: only `cached_whole` is cached."""
    cached_whole: int = 0
    """Numbers of a token in the cache that every rank has: a latent, or the key of an indexer."""
    cached_expanded: int = 0
    """Numbers of a head and a token in a cache of heads that are computed from latents. 0: as in other caches."""
    selected: int = 0
    """Maximum keys of a query, selected by an indexer. 0: all."""
    values_in_keys: bool = False
    """True if the values are a part of the keys, which is read once."""
    index_width: int = 0
    """Width of the key of the layer's own indexer. 0: no indexer."""
    index_flops: int = 0
    """FLOPs of the indexer for a query and a key."""
    state_size: int = 0
    """Numbers of the states of one sample on all tp ranks, in float32 at least."""
    transition_size: int = 0
    """Numbers of the matrices [D, D] that a segment of tokens multiplies all states by."""
    state_flops: int = 0
    """Forward FLOPs of one token for the states, whatever the context."""
    conv_width: int = 0
    """Channels of the convolutions over neighbouring tokens, on all tp ranks. 0: none."""
    conv_kernel: int = 1
    """Tokens that a convolution combines."""

    @property
    def key_value_width(self) -> int:
        """Width of the key and value of a head in exchanges between ranks."""
        return self.key_width if self.values_in_keys else self.key_width + self.value_width

    def flops(self, keys: float) -> float:
        """Return the forward FLOPs of one token, given the mean number of keys in its context."""
        selected = min(keys, self.selected) if self.selected else keys
        softmax = 2 * selected * self.heads * (self.key_width + self.value_width) + keys * self.index_flops
        return softmax + self.state_flops

    def cached_width(self, tp: int, *, expanded: bool = False) -> int:
        """Return the numbers that one of `tp` ranks caches of a token.

        Args:
            tp: ranks that share the heads.
            expanded: whether the cache holds heads computed from latents.
        """
        if expanded and self.cached_expanded:
            return self.heads // tp * self.cached_expanded
        sharded = max(1, self.cached_heads // tp) * (self.key_width + self.value_width) if self.cached_heads else 0
        return sharded + self.cached_whole

    def state_bytes(self, tp: int, item_bytes: int) -> int:
        """Return the bytes of the states of one sample on one of `tp` ranks: states of heads, and the last tokens."""
        tokens = (self.conv_kernel - 1) * self.conv_width * item_bytes
        return (self.state_size * max(4, item_bytes) + tokens) // tp


@dataclass(frozen=True, kw_only=True)
class SpanPart(Part):
    """Limit of the context of a query."""

    group: ClassVar[str] = "span"

    @property
    def window(self) -> int:
        """Maximum keys of a query, including its own key. 0: no limit."""
        return 0

    def formula(self) -> "Callable[[Tensor], Tensor] | None":
        """Return the mask of hidden keys: positions in documents [B, S] -> bool [B, S queries, S keys]."""
        return None

    @property
    def chunk(self) -> int:
        """Tokens of a chunk of a document, which limits the keys of a query. 0: the whole document."""
        return 0


@dataclass(frozen=True, kw_only=True)
class QueryKeyNorm(Table):
    """RMSNorm over the queries and over the keys."""

    over: Literal["head", "all_heads"] = "head"
    """Width of the root mean square: each head separately, or all heads of a token together (OLMoE)."""
    after_rope: bool = False
    """Apply the norm of each query and key head after RoPE instead of before it (Hunyuan)."""
    weight: bool = True
    """Learned weights. False: the norms only divide by the root mean square (Llama 4)."""
    in_nope: bool = True
    """Apply the norms in layers without RoPE ('nope' in model.layers) as well."""

    @property
    def over_all_heads(self) -> bool:
        """Return whether the root mean square is over all heads of a token together, not over each head."""
        return self.over != "head"

    def params(self, heads: int, kv_heads: int, head_dim: int) -> Iterator[ParamSpec]:
        """Yield the weights of both norms."""
        query, key = (
            ParamSpec("query_norm.weight", (head_dim,), "norms"),
            ParamSpec("key_norm.weight", (head_dim,), "norms"),
        )
        if self.over_all_heads:
            yield replace(query, shape=(heads * head_dim,), tp_dim=0)
            yield replace(key, shape=(kv_heads * head_dim,), tp_dim=0, tp_heads=kv_heads)
        elif self.weight:
            yield from (query, key)


@dataclass(frozen=True, kw_only=True)
class AttentionFrame:
    """Sizes and settings of the model for the module of an attention."""

    hidden_size: int
    """Width of the residual stream, H."""
    norm_eps: float
    """Epsilon of the norms of heads."""
    zero_centered_norms: bool
    """True if the norms of heads multiply by 1 + weight."""
    score_factor: float
    """Factor of the scores of latent attention that comes from the scaling of RoPE. 1: none."""


@dataclass(frozen=True, kw_only=True)
class AttentionPart(Part):
    """Attention of a layer."""

    group: ClassVar[str] = "attention"
    key: ClassVar[str] = "model.attention"
    is_of_layers: ClassVar[bool] = True
    of_layers: ClassVar[frozenset[str]] = frozenset({"span", "has_rope"})
    has_adapters: ClassVar[bool] = False
    """True if the module of the attention adds low-rank adapters to its matrices."""
    has_temperature: ClassVar[bool] = False
    """True if layers without RoPE may have an attention temperature (`temperature`)."""
    has_score_factor: ClassVar[bool] = False
    """True if attention scores are multiplied by the factor of the RoPE scaling (`RopeScalingPart.score_factor`)."""
    is_recurrent: ClassVar[bool] = False
    """True if states of a fixed size take the place of a KV cache."""
    own_recompute_parts: ClassVar[tuple[str, ...]] = ()
    """Parts of `train.recompute` that only this kind has: projections from latents to heads, which the core saves. A
    module has an attribute PART_checkpoint for each, an `OutputCheckpoint`."""
    rotary_dim: ClassVar[Any] = 0
    """Dims of a head with RoPE, for a part of another package. Built-in parts read the recipe's keys."""
    span: SpanPart | None = None
    """Limit of the context of a query. None: only causality."""
    has_rope: bool = True
    """True if queries and keys have RoPE."""

    @property
    def fuses_head_norms(self) -> bool:
        """Return whether norms of heads with weights come right before RoPE, so that one kernel computes both."""
        return False

    @property
    def has_sinks(self) -> bool:
        """Return whether the softmax of each head has an additional logit without a key."""
        return False

    @property
    def selector(self) -> IndexerPart | None:
        """Source of the selected keys of a query, or None if a query attends to all keys."""
        return None

    @property
    def shares_selection(self) -> bool:
        """Return whether an earlier layer selects the keys."""
        return self.selector is not None and self.selector.is_shared

    def params(self, hidden: int) -> Iterator[ParamSpec]:
        """Yield the parameters of the module, by their names in it and in its order.

        A matrix costs one multiply-add for each of its elements and each token.
        """
        raise NotImplementedError

    def core(self, hidden: int) -> AttentionCore:
        """Return the sizes of the computation without weights."""
        raise NotImplementedError

    def with_heads(self, hidden: int) -> Self:
        """Return the part with a resolved width of its heads."""
        return self

    def with_shared_selection(self) -> Self:
        """Return the part with an indexer that shares the selection of an earlier layer, if it has an indexer."""
        return self

    def formula(self) -> LinearFormula | SoftmaxFormula | None:
        """Return the formula: a `LinearFormula` if `is_recurrent`, else a `SoftmaxFormula`."""
        return None

    def build(self, frame: AttentionFrame) -> "Module":
        """Return the module, a `TokenMixer` with the parameters of `params`."""
        raise NotImplementedError

    @property
    def window(self) -> int:
        """Sliding window in tokens. 0: none."""
        return self.span.window if self.span else 0

    @property
    def recompute_parts(self) -> frozenset[str]:
        """Parts of `train.recompute` in this attention."""
        return frozenset()

    def tp_unit(self, hidden: int) -> tuple[str, int]:
        """Return the recipe key of the number that tensor parallelism divides, and this number."""
        core = self.core(hidden)
        return ("heads of model.attention", core.heads) if core.heads else ("model.hidden_size", hidden)

    @property
    def index_source(self) -> int:
        """Width of the latent that the indexer's queries come from. 0: they come from the layer's input."""
        return 0

    def up_weights(self, hidden: int) -> int:
        """Return the elements of the projections that are recomputed for `own_recompute_parts`."""
        return 0

    def saved(self, sizes: "LayerSizes") -> Counter[str] | None:
        """Return the bytes saved for backward by part of the model, without the input, or None if it is unknown."""
        return None

    def delayed_wgrad(self, sizes: "LayerSizes") -> Counter[str] | None:
        """Return the bytes of GEMM inputs and output gradients that a split backward pass holds. None: unknown."""
        return None

    def transient(self, sizes: "LayerSizes") -> Counter[str]:
        """Return the peak of temporary bytes while the layer runs or is recomputed."""
        return Counter()


@dataclass(frozen=True, kw_only=True)
class Temperature(Table):
    """Attention temperature of layers without RoPE, as in Llama 4 (arXiv:2501.19399).

    Queries at position p of their document are multiplied by 1 + scale * ln(1 + floor((p + 1) / tokens)).
    """

    scale: Annotated[float, POSITIVE] = 0.1
    """Factor of the logarithm."""
    tokens: Annotated[int, at_least(1)] = 8192
    """Positions below this number have temperature 1."""

    def shrink(self, small: "SmallSizes") -> "Temperature":
        """Return the temperature with values other than 1 in short sequences."""
        return replace(self, tokens=min(self.tokens, small.span))


@dataclass(frozen=True, kw_only=True)
class OutputGate(Table):
    """Gate of the output of each head: the sigmoid of a projection of the layer's input (arXiv:2505.06708)."""

    per: Literal["dim", "head"] = "dim"
    """One gate for each dim of a head, or one for the whole head (Ling 3)."""

    @property
    def per_head(self) -> bool:
        """Return whether a gate belongs to a whole head, not to one dim of it."""
        return self.per != "dim"

    def rows(self, heads: int, value_width: int) -> int:
        """Return the rows of the projection."""
        return heads if self.per_head else heads * value_width

    def params(self, heads: int, value_width: int, hidden: int) -> Iterator[ParamSpec]:
        """Yield the projection. Muon gains nothing from a matrix with one row for each head."""
        rows = self.rows(heads, value_width)
        yield ParamSpec("wg", (rows, hidden), "attention", tp_dim=0, never_as_matrix=self.per_head)


@dataclass(frozen=True, kw_only=True)
class SoftmaxAttentionPart(AttentionPart):
    """Softmax attention with heads that tensor parallelism shards."""

    framed: ClassVar[frozenset[str]] = frozenset({"indexer"})
    num_heads: Annotated[int, at_least(1), MaxMagnitude(MAX_WIDTH)] = 8
    """Query heads, A."""
    gate: OutputGate | None = None
    """Multiply the output of each head by the sigmoid of a projection of the layer's input, before the output
    projection (arXiv:2505.06708)."""
    indexer: Annotated[IndexerPart | None, KindOf("indexer", "not is_shared")] = None
    """Attend to the keys that an indexer selects (sparse attention, arXiv:2512.02556). none: attend to all keys."""

    def tp_unit(self, hidden: int) -> tuple[str, int]:
        """Return the key and number of the query heads, which tp must divide."""
        return "model.attention.num_heads", self.num_heads

    @property
    def selector(self) -> IndexerPart | None:
        """The indexer."""
        return self.indexer

    def with_shared_selection(self) -> Self:
        """Return the part with a shared indexer of the same sizes."""
        if self.indexer is None:
            return self
        sizes = {field.name: getattr(self.indexer, field.name) for field in fields(self.indexer)}
        return replace(self, indexer=make_part("indexer", "shared", **sizes))

    @property
    def own_indexer(self) -> IndexerPart | None:
        """Return the layer's own indexer, or None if the layer attends to all keys, or shares an earlier selection."""
        return None if self.shares_selection else self.indexer

    @property
    def recompute_parts(self) -> frozenset[str]:
        """Recomputable parts: the core if no indexer selects keys."""
        return frozenset() if self.indexer else frozenset({"core_attention"})

    @property
    def gate_size(self) -> int:
        """Gates of one head. 0: none."""
        return self.gate.rows(1, self.value_width) if self.gate else 0

    @property
    def value_width(self) -> int:
        """Width of one value head."""
        raise NotImplementedError


def gate_bytes(part: SoftmaxAttentionPart, sizes: "LayerSizes") -> int:
    """Return the bytes of the sigmoid of the output gate, and of its product with the heads."""
    heads = part.num_heads // sizes.parallel.tp
    return sizes.gathered_bytes(heads * (part.gate_size + part.value_width)) if part.gate else 0


def norm_param(name: str, width: int, drawn: Distribution | None = None) -> ParamSpec:
    """Return the weight of an RMSNorm, or "ones" if the norm is never zero-centred."""
    return ParamSpec(f"{name}.weight", (width,), "norms", drawn=drawn)


def prefixed(prefix: str, weights: Iterable[ParamSpec]) -> Iterator[ParamSpec]:
    """Yield parameters with a prefix before their names."""
    return (replace(weight, name=f"{prefix}.{weight.name}") for weight in weights)
