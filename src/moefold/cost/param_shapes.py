"""Every parameter of a model by shape, and how the axes cut it: what a rank holds, with nothing built. Torch-free.

The twin of `parallel/fsdp.py`, which cuts the real tensors; a test holds the two to the same bytes.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from typing import Literal

from moefold.config.schema import ModelConfig

ModelPart = Literal[
    "embedding", "head", "attention", "dense_mlp", "router", "experts", "shared_experts", "norms", "mtp"
]


@dataclass(frozen=True, slots=True)
class WeightShape:
    """One parameter: the whole one, or what is left of it once tensor or expert parallelism has cut it."""

    part: ModelPart
    shape: tuple[int, ...]
    tp_dim: int | None = None
    """Dim that tensor parallelism cuts; None: every tp rank holds it whole."""
    etp_dim: int | None = None
    """Of the routed experts, the dim that expert tensor parallelism cuts; dim 0 is cut over ep."""
    uses_muon: bool = False
    """Whether Muon updates it if its part is one of train.muon_groups."""

    @property
    def is_expert(self) -> bool:
        """Whether it belongs to the MoE view."""
        return self.part == "experts"

    @property
    def numel(self) -> int:
        """Numbers in it."""
        return prod(self.shape)

    def shard(self, tp: int, ep: int, etp: int) -> "WeightShape":
        """What one rank of tensor or expert parallelism holds of it."""
        shape = list(self.shape)
        if self.is_expert:
            shape[0] //= ep
            if self.etp_dim is not None:
                shape[self.etp_dim] //= etp
        elif self.tp_dim is not None:
            shape[self.tp_dim] //= tp
        return replace(self, shape=tuple(shape))

    def dp_shards(self, degree: int) -> "DataParallelShards":
        """How data parallelism over so many ranks cuts what is left: by rows, or each expert's rows if too few."""
        dim = 0
        if self.is_expert and self.shape[0] % degree and self.shape[1] % degree == 0:
            dim = 1
        rows = -(-self.shape[dim] // degree)
        return DataParallelShards(self.shape[dim], rows, self.numel // self.shape[dim], degree)


@dataclass(frozen=True, slots=True)
class DataParallelShards:
    """A parameter cut over data-parallel ranks; the first ones hold `rows` rows, the last ones fewer or none."""

    total_rows: int
    rows: int
    row_numel: int
    degree: int

    @property
    def padded_numel(self) -> int:
        """Numbers of a shard with its padding, on every rank: what FSDP keeps, sends and reduces."""
        return self.rows * self.row_numel

    def numel(self, dp_rank: int) -> int:
        """Numbers of the shard of one rank, without padding."""
        return max(0, min(self.rows, self.total_rows - dp_rank * self.rows)) * self.row_numel


@lru_cache(maxsize=256)
def layer_weights(model: ModelConfig, kind: str, tp: int) -> tuple[WeightShape, ...]:
    """The parameters of one layer of kind "D" or "M"; whole, `tp` only decides what can be cut."""
    hidden = model.hidden_size
    ffn = _moe(model) if kind == "M" else _swiglu("dense_mlp", hidden, model.ffn_hidden_size)
    attention = _mla(model) if model.attention == "mla" else _attention(model, tp)
    return (WeightShape("norms", (hidden,)), *attention, WeightShape("norms", (hidden,)), *ffn)


def mtp_layer_weights(model: ModelConfig, tp: int) -> tuple[WeightShape, ...]:
    """The parameters of one layer of multi-token prediction."""
    hidden = model.hidden_size
    own = (WeightShape("mtp", (hidden, 2 * hidden), uses_muon=True), *(WeightShape("norms", (hidden,)),) * 3)
    return (*layer_weights(model, model.layer_kinds[-1], tp), *own)


def embedding_weight(model: ModelConfig) -> WeightShape:
    """The token embedding."""
    return WeightShape("embedding", (model.vocab_size, model.hidden_size), tp_dim=0)


def head_weights(model: ModelConfig) -> tuple[WeightShape, ...]:
    """The last norm, and the output head unless it is the embedding."""
    norm = WeightShape("norms", (model.hidden_size,))
    return (norm,) if model.tie_embeddings else (norm, replace(embedding_weight(model), part="head"))


def _attention(model: ModelConfig, tp: int) -> Iterator[WeightShape]:
    hidden, head = model.hidden_size, model.head_size
    query, key_value = model.num_attention_heads * head, model.num_query_groups * head
    group_dim = 0 if model.num_query_groups % tp == 0 else None
    yield WeightShape("attention", (query, hidden), 0, uses_muon=True)
    yield WeightShape("attention", (key_value, hidden), group_dim, uses_muon=True)
    yield WeightShape("attention", (key_value, hidden), group_dim, uses_muon=True)
    yield WeightShape("attention", (hidden, query), 1, uses_muon=True)
    if model.qkv_bias:
        yield WeightShape("attention", (query,), 0)
        yield WeightShape("attention", (key_value,), group_dim)
        yield WeightShape("attention", (key_value,), group_dim)
    if model.attention_output_bias:
        yield WeightShape("attention", (hidden,))
    if model.attention_sinks:
        yield WeightShape("attention", (model.num_attention_heads,), 0)
    if model.qk_norm and model.qk_norm_width == "all_heads":
        yield WeightShape("norms", (query,), 0)
        yield WeightShape("norms", (key_value,), group_dim)
    elif model.qk_norm:
        yield WeightShape("norms", (head,))
        yield WeightShape("norms", (head,))


def _mla(model: ModelConfig) -> Iterator[WeightShape]:
    hidden, heads = model.hidden_size, model.num_attention_heads
    query, query_rank, rank = heads * model.head_size, model.q_lora_rank, model.kv_lora_rank
    if query_rank:
        yield WeightShape("attention", (query_rank, hidden), uses_muon=True)
        yield WeightShape("attention", (query, query_rank), 0, uses_muon=True)
        yield WeightShape("norms", (query_rank,))
    else:
        yield WeightShape("attention", (query, hidden), 0, uses_muon=True)
    yield WeightShape("attention", (rank + model.qk_rope_head_dim, hidden), uses_muon=True)
    yield WeightShape("attention", (heads * (model.qk_nope_head_dim + model.v_head_dim), rank), 0, uses_muon=True)
    yield WeightShape("norms", (rank,))
    yield WeightShape("attention", (hidden, heads * model.v_head_dim), 1, uses_muon=True)


def _moe(model: ModelConfig) -> Iterator[WeightShape]:
    hidden, ffn, experts = model.hidden_size, model.moe_ffn_hidden_size, model.num_experts
    yield WeightShape("router", (experts, hidden), uses_muon=True)
    if model.router_bias:
        yield WeightShape("router", (experts,))
    yield WeightShape("experts", (experts, hidden, ffn), etp_dim=2, uses_muon=True)
    yield WeightShape("experts", (experts, hidden, ffn), etp_dim=2, uses_muon=True)
    yield WeightShape("experts", (experts, ffn, hidden), etp_dim=1, uses_muon=True)
    if model.moe_bias:
        for width in (ffn, ffn, hidden):
            yield WeightShape("experts", (experts, width), etp_dim=1)
    if model.shared_expert_ffn_hidden_size:
        yield from _swiglu("shared_experts", hidden, model.shared_expert_ffn_hidden_size)
        if model.shared_expert_gate:
            yield WeightShape("shared_experts", (1, hidden))


def _swiglu(part: ModelPart, hidden: int, ffn: int) -> Iterator[WeightShape]:
    yield WeightShape(part, (ffn, hidden), 0, uses_muon=True)
    yield WeightShape(part, (ffn, hidden), 0, uses_muon=True)
    yield WeightShape(part, (hidden, ffn), 1, uses_muon=True)
