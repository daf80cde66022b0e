"""Parameter shapes of a model and how each parallel axis shards them, without building the model. Torch-free.

The counterpart of `parallel/fsdp.py`, which shards the real tensors; a test compares both to the byte.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from typing import Literal

from moefold.config.model import ModelConfig

ModelPart = Literal[
    "embedding", "head", "attention", "dense_mlp", "router", "experts", "shared_experts", "norms", "mtp"
]


@dataclass(frozen=True, slots=True)
class WeightShape:
    """Shape of one parameter, unsharded or sharded by tensor or expert parallelism."""

    part: ModelPart
    shape: tuple[int, ...]
    tp_dim: int | None = None
    """Dim sharded by tensor parallelism; None: replicated on every tp rank."""
    etp_dim: int | None = None
    """Dim of routed experts sharded by expert tensor parallelism; dim 0 is sharded over ep."""
    uses_muon: bool = False
    """Whether Muon updates it if its part is in train.muon_groups."""

    @property
    def is_expert(self) -> bool:
        """Return whether the parameter belongs to the MoE view."""
        return self.part == "experts"

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    def shard(self, tp: int, ep: int, etp: int) -> "WeightShape":
        """Return the shard of one rank of tensor or expert parallelism."""
        shape = list(self.shape)
        if self.is_expert:
            shape[0] //= ep
            if self.etp_dim is not None:
                shape[self.etp_dim] //= etp
        elif self.tp_dim is not None:
            shape[self.tp_dim] //= tp
        return replace(self, shape=tuple(shape))

    def dp_shards(self, degree: int) -> "DataParallelShards":
        """Return the shards over `degree` data-parallel ranks: dim 0, or dim 1 of experts if there are too few."""
        dim = 0
        if self.is_expert and self.shape[0] % degree and self.shape[1] % degree == 0:
            dim = 1
        rows = -(-self.shape[dim] // degree)
        return DataParallelShards(self.shape[dim], rows, self.numel // self.shape[dim], degree)


@dataclass(frozen=True, slots=True)
class DataParallelShards:
    """Parameter sharded over data-parallel ranks; the first ranks hold `rows` rows, the last ones fewer or none."""

    total_rows: int
    rows: int
    row_numel: int
    degree: int

    @property
    def padded_numel(self) -> int:
        """Elements of a shard with FSDP's padding, the same on every rank."""
        return self.rows * self.row_numel

    def numel(self, dp_rank: int) -> int:
        """Return the elements of one rank's shard, without padding."""
        return max(0, min(self.rows, self.total_rows - dp_rank * self.rows)) * self.row_numel


@lru_cache(maxsize=256)
def layer_weights(model: ModelConfig, kind: str, tp: int) -> tuple[WeightShape, ...]:
    """Return the unsharded parameters of a layer of kind "D" or "M"; `tp` only decides which can be sharded."""
    hidden = model.hidden_size
    ffn = _moe(model) if kind == "M" else _swiglu("dense_mlp", hidden, model.ffn_hidden_size)
    attention = _mla(model) if model.attention == "mla" else _attention(model, tp)
    return (WeightShape("norms", (hidden,)), *attention, WeightShape("norms", (hidden,)), *ffn)


def mtp_layer_weights(model: ModelConfig, tp: int) -> tuple[WeightShape, ...]:
    """Return the parameters of one MTP (multi-token prediction) layer."""
    hidden = model.hidden_size
    mtp_weights = (WeightShape("mtp", (hidden, 2 * hidden), uses_muon=True), *(WeightShape("norms", (hidden,)),) * 3)
    return (*layer_weights(model, model.layer_kinds[-1], tp), *mtp_weights)


def embedding_weight(model: ModelConfig) -> WeightShape:
    """Return the token embedding."""
    return WeightShape("embedding", (model.vocab_size, model.hidden_size), tp_dim=0)


def head_weights(model: ModelConfig) -> tuple[WeightShape, ...]:
    """Return the last norm, and the output head unless embeddings are tied."""
    norm = WeightShape("norms", (model.hidden_size,))
    return (norm,) if model.tie_embeddings else (norm, replace(embedding_weight(model), part="head"))


def _attention(model: ModelConfig, tp: int) -> Iterator[WeightShape]:
    hidden = model.hidden_size
    head = model.head_size
    query = model.num_attention_heads * head
    key_value = model.num_query_groups * head
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
    hidden = model.hidden_size
    heads = model.num_attention_heads
    query = heads * model.head_size
    query_rank = model.q_lora_rank
    rank = model.kv_lora_rank
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
    hidden = model.hidden_size
    ffn = model.moe_ffn_hidden_size
    experts = model.num_experts
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
