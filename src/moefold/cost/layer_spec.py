"""The blocks of a model by name: the parameters of each, and its FLOPs beyond their GEMMs. Torch-free.

This is the one description of a model's parameters: sharding, counts, FLOPs, state memory, Muon's groups, the planner
and conversion read it. The modules are in `model/`, and `model/registry.py` has a builder for each name. To add a block
see docs/extending.md.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from moefold.config.model import ModelConfig
from moefold.config.param_spec import ModelPart, ParamSpec


def softmax_core_flops(model: ModelConfig, keys: float) -> float:
    """Return the FLOPs of the scores and of their product with the values."""
    return 2 * keys * model.num_attention_heads * (model.head_size + model.value_head_size)


def key_value_cache_width(model: ModelConfig, tp: int) -> int:
    """Return the width of the keys and values of a token on one of `tp` ranks; with tp > groups each has one group."""
    return 2 * max(1, model.num_query_groups // tp) * model.head_size


def shared_core_flops(model: ModelConfig, keys: float) -> float:
    """Return the FLOPs of grouped-query attention over keys that an earlier layer selected."""
    return softmax_core_flops(model, min(keys, model.index_topk))


def sparse_core_flops(model: ModelConfig, keys: float) -> float:
    """Return the FLOPs of grouped-query attention over the selected keys, and of the indexer's scores of all keys."""
    return shared_core_flops(model, keys) + _index_flops(model, keys)


def shared_latent_core_flops(model: ModelConfig, keys: float) -> float:
    """Return the FLOPs of latent attention over keys that an earlier layer selected, in the space of the latents.

    The up projection of the keys and values is multiplied with each query instead of each key: as many FLOPs.
    """
    widths = 2 * model.kv_lora_rank + model.qk_rope_head_dim
    return 2 * min(keys, model.index_topk) * model.num_attention_heads * widths


def sparse_latent_core_flops(model: ModelConfig, keys: float) -> float:
    """Return the FLOPs of latent attention over the selected keys, and of the indexer."""
    return shared_latent_core_flops(model, keys) + _index_flops(model, keys)


def _index_flops(model: ModelConfig, keys: float) -> float:
    """Return the FLOPs of the indexer's scores: a product for each head, and their weighted sum."""
    return 2 * keys * model.index_heads * (model.index_head_dim + 1)


def sparse_cache_width(model: ModelConfig, tp: int) -> int:
    """Return the width of the keys and values of a token on one of `tp` ranks, with the indexer's key."""
    return key_value_cache_width(model, tp) + model.index_head_dim


def sparse_latent_cache_width(model: ModelConfig, tp: int) -> int:
    """Return the width of the latent and the shared key of a token, with the indexer's key, which every rank has."""
    return latent_cache_width(model, tp) + model.index_head_dim


def delta_rule_flops(model: ModelConfig, keys: float) -> float:
    """Return the FLOPs of the recurrence of linear attention: a state is read twice, written once, and decays."""
    return 8 * recurrent_state_size(model)


def gla_flops(model: ModelConfig, keys: float) -> float:
    """Return the FLOPs of the recurrence of gated linear attention: a state is read and written once, and decays."""
    return 6 * recurrent_state_size(model)


def no_core_flops(model: ModelConfig, keys: float) -> float:
    """Return 0: a convolution counts as a matrix."""
    return 0.0


def recurrent_state_size(model: ModelConfig) -> int:
    """Return the numbers of the states of all heads of one sample in a layer of linear attention."""
    return model.linear_num_value_heads * model.linear_key_head_dim * model.linear_value_head_dim


def transition_size(model: ModelConfig) -> int:
    """Return the numbers of the matrices [D, D] of all heads that turn the states before a segment of tokens."""
    return model.linear_num_value_heads * model.linear_key_head_dim**2


def qkv_width(model: ModelConfig) -> int:
    """Return the channels of the convolutions over queries, keys and values of linear attention."""
    value = model.linear_num_value_heads * model.linear_value_head_dim
    return 2 * model.linear_num_key_heads * model.linear_key_head_dim + value


def _nothing(model: ModelConfig) -> int:
    return 0


def no_cache_width(model: ModelConfig, tp: int) -> int:
    """Return 0: a state has the same size at any length; see `cost/kv_cache.py`."""
    return 0


def latent_cache_width(model: ModelConfig, tp: int) -> int:
    """Return the width of the latent and the shared key of a token, which every rank has."""
    return model.kv_lora_rank + model.qk_rope_head_dim


@dataclass(frozen=True, kw_only=True)
class BlockSpec:
    """One kind of attention, or of feed-forward network."""

    name: str
    """As in `model.attention` or `model.linear_attention`, or as a letter of `model.layer_pattern`."""
    weights: Callable[[ModelConfig], Iterable[ParamSpec]]
    """Parameters of the module, by their names in it and in its order.

    A matrix costs one multiply-add for each of its elements and each token; of the experts, a token uses top_k."""
    core_flops: Callable[[ModelConfig, float], float] = softmax_core_flops
    """Of attention: forward FLOPs of one token without a weight, given the mean number of keys that it attends to."""
    cache_width: Callable[[ModelConfig, int], int] = key_value_cache_width
    """Of attention: elements of one token in the KV cache of one tp rank."""
    state_size: Callable[[ModelConfig], int] = _nothing
    """Of a layer of kind L: numbers of the recurrent states of one sample on all tp ranks, in float32 at least."""
    transition_size: Callable[[ModelConfig], int] = _nothing
    """Of a layer of kind L: numbers of the matrices [D, D] by which a segment of tokens turns all states."""
    conv_width: Callable[[ModelConfig], int] = _nothing
    """Of a layer of kind L: channels of its convolutions over neighbouring tokens, on all tp ranks."""


@lru_cache(maxsize=256)
def layer_weights(model: ModelConfig, kind: str) -> tuple[ParamSpec, ...]:
    """Return the unsharded parameters of a layer of one of `BLOCK_KINDS`."""
    return (
        *_residual_norms(model, "attention_norm", "pre"),
        *_prefixed("attention", attention_spec(model, kind).weights(model)),
        *_residual_norms(model, "attention_output_norm", "post"),
        *_residual_norms(model, "ffn_norm", "pre"),
        *_prefixed("ffn", FEED_FORWARDS[kind[0]].weights(model)),
        *_residual_norms(model, "ffn_output_norm", "post"),
    )


@lru_cache(maxsize=256)
def mtp_layer_weights(model: ModelConfig) -> tuple[ParamSpec, ...]:
    """Return the parameters of one MTP (multi-token prediction) layer."""
    hidden = model.hidden_size
    return (
        ParamSpec("projection", (hidden, 2 * hidden), "mtp"),
        *layer_weights(model, model.mtp_block_kind),
        *(weight for name in ("embedding_norm", "hidden_norm", "output_norm") for weight in _hidden_norm(model, name)),
    )


def embedding_weight(model: ModelConfig) -> ParamSpec:
    """Return the token embedding."""
    return ParamSpec("weight", (model.vocab_size, model.hidden_size), "embedding", tp_dim=0)


def head_weights(model: ModelConfig) -> tuple[ParamSpec, ...]:
    """Return the last norm, the output head unless embeddings are tied, and its bias."""
    weight = () if model.tie_embeddings else (replace(embedding_weight(model), part="head"),)
    bias = (ParamSpec("bias", (model.vocab_size,), "head", tp_dim=0),) if model.head_bias else ()
    return (*weight, *bias, *_hidden_norm(model, "norm"))


@lru_cache(maxsize=16)
def model_weights(model: ModelConfig) -> dict[str, ParamSpec]:
    """Return every parameter of a model by its name, in the order of the module."""
    found = list(_prefixed("embedding", (embedding_weight(model),)))
    for i, kind in enumerate(model.block_kinds):
        found += _prefixed(f"layers.{i}", layer_weights(model, kind))
    for i in range(model.num_layers, model.num_layers + model.mtp_layers):
        found += _prefixed(f"layers.{i}", mtp_layer_weights(model))
    found += _prefixed("head", head_weights(model))
    return {weight.name: weight for weight in found}


def attention_name(model: ModelConfig, kind: str) -> str:
    """Return the name of the attention of a layer of one of `BLOCK_KINDS`: a key of `ATTENTIONS`."""
    if kind.endswith("L"):
        return model.linear_attention
    if kind.endswith("S"):
        return f"shared_sparse_{model.attention}"
    return f"sparse_{model.attention}" if model.index_topk else model.attention


def attention_spec(model: ModelConfig, kind: str = "D") -> BlockSpec:
    """Return the description of the attention of a layer of one of `BLOCK_KINDS`; by default, softmax attention."""
    return ATTENTIONS[attention_name(model, kind)]


def _prefixed(prefix: str, weights: Iterable[ParamSpec]) -> Iterator[ParamSpec]:
    return (replace(weight, name=f"{prefix}.{weight.name}") for weight in weights)


def _norm(name: str, width: int) -> ParamSpec:
    return ParamSpec(f"{name}.weight", (width,), "norms")


def _residual_norms(model: ModelConfig, name: str, placement: str) -> tuple[ParamSpec, ...]:
    """Return a norm of the residual stream's width, if the model has norms there."""
    return _hidden_norm(model, name) if model.norm_placement in (placement, "both") else ()


def _hidden_norm(model: ModelConfig, name: str) -> tuple[ParamSpec, ...]:
    """Return the parameters of a norm of the residual stream's width."""
    weight = _norm(name, model.hidden_size)
    return (weight, replace(weight, name=f"{name}.bias")) if model.norm == "layernorm" else (weight,)


def gqa_weights(model: ModelConfig) -> Iterator[ParamSpec]:
    """Yield the parameters of `Attention`."""
    hidden = model.hidden_size
    head = model.head_size
    heads = model.num_attention_heads
    groups = model.num_query_groups
    query = heads * head
    key_value = groups * head
    yield ParamSpec("wq", (query, hidden), "attention", tp_dim=0)
    yield ParamSpec("wk", (key_value, hidden), "attention", tp_dim=0, tp_heads=groups)
    yield ParamSpec("wv", (key_value, hidden), "attention", tp_dim=0, tp_heads=groups)
    yield ParamSpec("wo", (hidden, query), "attention", tp_dim=1)
    if model.qkv_bias:
        yield ParamSpec("bq", (query,), "attention", tp_dim=0)
        yield ParamSpec("bk", (key_value,), "attention", tp_dim=0, tp_heads=groups)
        yield ParamSpec("bv", (key_value,), "attention", tp_dim=0, tp_heads=groups)
    if model.attention_output_bias:
        yield ParamSpec("bo", (hidden,), "attention")
    if model.attention_sinks:
        yield ParamSpec("sinks", (heads,), "attention", tp_dim=0)
    if model.attention_gate:
        yield _output_gate(model)
    if model.qk_norm and model.qk_norm_width == "all_heads":
        yield replace(_norm("query_norm", query), tp_dim=0)
        yield replace(_norm("key_norm", key_value), tp_dim=0, tp_heads=groups)
    elif model.qk_norm and model.qk_norm_weight:
        yield _norm("query_norm", head)
        yield _norm("key_norm", head)


def _output_gate(model: ModelConfig) -> ParamSpec:
    """Return the projection to the output gate; of one row a head, Muon has nothing to gain."""
    rows = model.num_attention_heads * model.attention_gate_size
    is_narrow = model.attention_gate_width == "head"
    return ParamSpec("wg", (rows, model.hidden_size), "attention", tp_dim=0, always_adamw=is_narrow)


def mla_weights(model: ModelConfig) -> Iterator[ParamSpec]:
    """Yield the parameters of `LatentAttention`."""
    hidden = model.hidden_size
    heads = model.num_attention_heads
    query = heads * model.head_size
    query_rank = model.q_lora_rank
    rank = model.kv_lora_rank
    # The shared key is a logical matrix of its own, and so are the keys and the values of each head.
    down_rows = (rank, model.qk_rope_head_dim)
    up_rows = (model.qk_nope_head_dim, model.v_head_dim)
    if query_rank:
        yield ParamSpec("wq_down", (query_rank, hidden), "attention")
        yield ParamSpec("wq_up", (query, query_rank), "attention", tp_dim=0)
    else:
        yield ParamSpec("wq", (query, hidden), "attention", tp_dim=0)
    yield ParamSpec("wkv_down", (sum(down_rows), hidden), "attention", matrix_rows=down_rows)
    yield ParamSpec("wkv_up", (heads * sum(up_rows), rank), "attention", tp_dim=0, matrix_rows=up_rows)
    yield ParamSpec("wo", (hidden, heads * model.v_head_dim), "attention", tp_dim=1)
    if model.attention_gate:
        yield _output_gate(model)
    if query_rank:
        yield _norm("query_norm", query_rank)
    yield _norm("key_value_norm", rank)


def indexer_weights(model: ModelConfig) -> Iterator[ParamSpec]:
    """Yield the parameters of `LightningIndexer`, which every tp rank has."""
    heads = model.index_heads
    source = model.q_lora_rank if model.attention == "mla" else 0
    yield ParamSpec("wq", (heads * model.index_head_dim, source or model.hidden_size), "attention")
    yield ParamSpec("wk", (model.index_head_dim, model.hidden_size), "attention")
    yield ParamSpec("weights_proj", (heads, model.hidden_size), "attention", always_adamw=True)
    yield _norm("key_norm", model.index_head_dim)
    yield ParamSpec("key_norm.bias", (model.index_head_dim,), "norms")


def sparse_gqa_weights(model: ModelConfig) -> Iterator[ParamSpec]:
    """Yield the parameters of `SparseAttention`."""
    yield from gqa_weights(model)
    yield from _prefixed("indexer", indexer_weights(model))


def sparse_mla_weights(model: ModelConfig) -> Iterator[ParamSpec]:
    """Yield the parameters of `SparseLatentAttention`."""
    yield from mla_weights(model)
    yield from _prefixed("indexer", indexer_weights(model))


def _delta_weights(model: ModelConfig) -> Iterator[ParamSpec]:
    """Yield the parameters of `DeltaAttention`, the norm last."""
    hidden = model.hidden_size
    heads = model.linear_num_value_heads
    key = model.linear_num_key_heads * model.linear_key_head_dim
    value = heads * model.linear_value_head_dim
    taps = model.linear_conv_kernel
    for name, width in (("wq", key), ("wk", key), ("wv", value)):
        yield ParamSpec(name, (width, hidden), "attention", tp_dim=0)
    yield ParamSpec("wb", (heads, hidden), "attention", tp_dim=0, always_adamw=True)
    yield ParamSpec("wo", (hidden, value), "attention", tp_dim=1)
    for name, width in (("conv_q", key), ("conv_k", key), ("conv_v", value)):
        yield ParamSpec(name, (width, taps), "attention", tp_dim=0, always_adamw=True)
    yield ParamSpec("a_log", (heads,), "attention", tp_dim=0, in_exponent=True)


def gated_deltanet_weights(model: ModelConfig) -> Iterator[ParamSpec]:
    """Yield the parameters of `GatedDeltaNet`."""
    heads = model.linear_num_value_heads
    hidden = model.hidden_size
    yield from _delta_weights(model)
    yield ParamSpec("wg", (heads * model.linear_value_head_dim, hidden), "attention", tp_dim=0)
    yield ParamSpec("wa", (heads, hidden), "attention", tp_dim=0, always_adamw=True)
    yield ParamSpec("dt_bias", (heads,), "attention", tp_dim=0, in_exponent=True)
    yield _norm("norm", model.linear_value_head_dim)


def kda_weights(model: ModelConfig) -> Iterator[ParamSpec]:
    """Yield the parameters of `KimiDeltaAttention`."""
    hidden = model.hidden_size
    rank = model.linear_value_head_dim
    channels = model.linear_num_value_heads * model.linear_key_head_dim
    value = model.linear_num_value_heads * rank
    yield from _delta_weights(model)
    if model.linear_full_rank_gates:
        yield ParamSpec("wa", (channels, hidden), "attention", tp_dim=0)
        yield ParamSpec("wg", (value, hidden), "attention", tp_dim=0)
    else:
        yield ParamSpec("wa_down", (rank, hidden), "attention")
        yield ParamSpec("wa_up", (channels, rank), "attention", tp_dim=0)
        yield ParamSpec("wg_down", (rank, hidden), "attention")
        yield ParamSpec("wg_up", (value, rank), "attention", tp_dim=0)
    yield ParamSpec("dt_bias", (channels,), "attention", tp_dim=0, in_exponent=True)
    yield _norm("norm", rank)


def gla_weights(model: ModelConfig) -> Iterator[ParamSpec]:
    """Yield the parameters of `GatedLinearAttention`."""
    hidden = model.hidden_size
    heads = model.linear_num_value_heads
    key = model.linear_num_key_heads * model.linear_key_head_dim
    value = heads * model.linear_value_head_dim
    channels = heads * model.linear_key_head_dim
    rank = model.linear_gate_rank
    for name, width in (("wq", key), ("wk", key), ("wv", value), ("wg", value)):
        yield ParamSpec(name, (width, hidden), "attention", tp_dim=0)
    yield ParamSpec("wa_down", (rank, hidden), "attention")
    yield ParamSpec("wa_up", (channels, rank), "attention", tp_dim=0)
    yield ParamSpec("ba", (channels,), "attention", tp_dim=0)
    yield ParamSpec("wo", (hidden, value), "attention", tp_dim=1)
    yield _norm("norm", model.linear_value_head_dim)


def short_convolution_weights(model: ModelConfig) -> Iterator[ParamSpec]:
    """Yield the parameters of `ShortConvolution`."""
    hidden = model.hidden_size
    for name in ("wb", "wc", "wv"):
        yield ParamSpec(name, (hidden, hidden), "attention", tp_dim=0)
    yield ParamSpec("conv", (hidden, model.linear_conv_kernel), "attention", tp_dim=0, always_adamw=True)
    yield ParamSpec("wo", (hidden, hidden), "attention", tp_dim=1)
    if model.linear_conv_bias:
        for name in ("bb", "bc", "bv", "conv_bias"):
            yield ParamSpec(name, (hidden,), "attention", tp_dim=0)
        yield ParamSpec("bo", (hidden,), "attention")


def swiglu_weights(part: ModelPart, hidden: int, ffn: int) -> Iterator[ParamSpec]:
    """Yield the parameters of `SwiGLU`."""
    yield ParamSpec("w_gate", (ffn, hidden), part, tp_dim=0)
    yield ParamSpec("w_up", (ffn, hidden), part, tp_dim=0)
    yield ParamSpec("w_down", (hidden, ffn), part, tp_dim=1)


def dense_weights(model: ModelConfig) -> Iterator[ParamSpec]:
    """Yield the parameters of the feed-forward network of a dense layer."""
    return swiglu_weights("dense_mlp", model.hidden_size, model.ffn_hidden_size)


def moe_weights(model: ModelConfig) -> Iterator[ParamSpec]:
    """Yield the parameters of `MoELayer`."""
    hidden = model.hidden_size
    ffn = model.moe_ffn_hidden_size
    experts = model.num_experts
    width = model.expert_hidden_size
    shared = model.shared_expert_ffn_hidden_size
    if shared and model.shared_expert_gate:
        yield ParamSpec("shared_gate", (1, hidden), "shared_experts", always_adamw=True)
    yield ParamSpec("router.weight", (model.num_router_choices, hidden), "router")
    if model.router_bias:
        yield ParamSpec("router.bias", (model.num_router_choices,), "router")
    yield ParamSpec("experts.w_gate", (experts, width, ffn), "experts", etp_dim=2)
    yield ParamSpec("experts.w_up", (experts, width, ffn), "experts", etp_dim=2)
    yield ParamSpec("experts.w_down", (experts, ffn, width), "experts", etp_dim=1)
    if model.moe_bias:
        yield ParamSpec("experts.b_gate", (experts, ffn), "experts", etp_dim=1)
        yield ParamSpec("experts.b_up", (experts, ffn), "experts", etp_dim=1)
        yield ParamSpec("experts.b_down", (experts, width), "experts", etp_dim=1)
    if model.moe_hidden_size:
        yield ParamSpec("latent_down.weight", (width, hidden), "shared_experts")
        yield ParamSpec("latent_up.weight", (hidden, width), "shared_experts")
    if shared:
        yield from _prefixed("shared", swiglu_weights("shared_experts", hidden, shared))


ATTENTIONS: dict[str, BlockSpec] = {
    spec.name: spec
    for spec in (
        BlockSpec(name="gqa", weights=gqa_weights),
        BlockSpec(name="mla", weights=mla_weights, cache_width=latent_cache_width),
        BlockSpec(
            name="sparse_gqa",
            weights=sparse_gqa_weights,
            core_flops=sparse_core_flops,
            cache_width=sparse_cache_width,
        ),
        BlockSpec(
            name="sparse_mla",
            weights=sparse_mla_weights,
            core_flops=sparse_latent_core_flops,
            cache_width=sparse_latent_cache_width,
        ),
        BlockSpec(name="shared_sparse_gqa", weights=gqa_weights, core_flops=shared_core_flops),
        BlockSpec(
            name="shared_sparse_mla",
            weights=mla_weights,
            core_flops=shared_latent_core_flops,
            cache_width=latent_cache_width,
        ),
        BlockSpec(
            name="gated_deltanet",
            weights=gated_deltanet_weights,
            core_flops=delta_rule_flops,
            cache_width=no_cache_width,
            state_size=recurrent_state_size,
            transition_size=transition_size,
            conv_width=qkv_width,
        ),
        BlockSpec(
            name="kda",
            weights=kda_weights,
            core_flops=delta_rule_flops,
            cache_width=no_cache_width,
            state_size=recurrent_state_size,
            transition_size=transition_size,
            conv_width=qkv_width,
        ),
        BlockSpec(
            name="gla",
            weights=gla_weights,
            core_flops=gla_flops,
            cache_width=no_cache_width,
            state_size=recurrent_state_size,
            transition_size=transition_size,
        ),
        BlockSpec(
            name="short_convolution",
            weights=short_convolution_weights,
            core_flops=no_core_flops,
            cache_width=no_cache_width,
            conv_width=lambda model: model.hidden_size,
        ),
    )
}
"""Every attention by its name in a recipe."""

FEED_FORWARDS: dict[str, BlockSpec] = {
    spec.name: spec for spec in (BlockSpec(name="D", weights=dense_weights), BlockSpec(name="M", weights=moe_weights))
}
"""Every feed-forward network by its letter in `model.layer_pattern`."""
