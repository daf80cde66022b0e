"""Random sizes for the models of every family, as the configuration classes of transformers take them.

A size that an axis cuts is even where a model has to run under mappings; everything else may be odd.
"""

import random
from collections.abc import Callable
from typing import Any

from moefold.convert.families.family import Family
from tests.convert.hf_models import EVEN, FILED, LATENT, LLAMA3, LONGROPE, QWEN_EXPERTS, YARN, options_of

Sizes = dict[str, Any]
_ONE_CHOICE = {"norm_topk_prob": False, "num_experts_per_tok": 1}


def random_sizes(family: str, seed: int, *, is_cut: bool) -> Sizes:
    """Return sizes that are laid over the sizes of `hf_models.MODELS`.

    Args:
        family: a name there.
        seed: the same seed gives the same sizes.
        is_cut: whether tp=2, ep=2, pp=2 and etp=2 must divide the model.
    """
    rng = random.Random(f"{family} {seed}")
    sizes = _backbone(rng, is_cut) | (FAMILIES | NEWER_FAMILIES)[family](rng, is_cut)
    # transformers gives the row of a padding token no gradient; ids of released models are beyond these vocabularies.
    return sizes | {"pad_token_id": None, "eos_token_id": None}


def _width(rng: random.Random, is_cut: bool) -> int:
    """Draw a width that tensor-parallel ranks divide."""
    return 2 * rng.randint(3, 14) if is_cut else rng.randint(5, 29)


def _hidden(rng: random.Random, heads: int) -> int:
    """Draw the width of the model; some configuration classes ask that the heads divide it."""
    return heads * (rng.choice([5, 7, 9]) if heads > 1 else rng.choice([17, 23]))


def _backbone(rng: random.Random, is_cut: bool) -> Sizes:
    """Sizes that all families have; attention heads in groups."""
    groups, share = rng.choice([1, 2]) if is_cut else rng.choice([1, 2, 3]), rng.choice([1, 2, 3])
    share *= 2 if is_cut and groups * share % 2 else 1
    head_dim = rng.choice([4, 6, 10])
    return {
        "vocab_size": 2 * rng.randint(20, 40) + (not is_cut),
        "hidden_size": _hidden(rng, groups * share),
        "num_hidden_layers": 2 if is_cut else rng.choice([1, 2, 3]),
        "num_attention_heads": groups * share,
        "num_key_value_heads": groups,
        "head_dim": head_dim,
        "tie_word_embeddings": rng.random() < 0.5,
        "rms_norm_eps": rng.choice([1e-6, 1e-3]),
        "rope_parameters": {"rope_type": "default", "rope_theta": rng.uniform(50.0, 9000.0)},
    }


def _dense(rng: random.Random, is_cut: bool) -> Sizes:
    stretches = {"rope_parameters": LLAMA3 | {"rope_theta": rng.uniform(50.0, 9000.0)}} if rng.random() < 0.5 else {}
    return {"intermediate_size": _width(rng, is_cut), **stretches}


def _dense_biased(rng: random.Random, is_cut: bool) -> Sizes:
    return _dense(rng, is_cut) | {"attention_bias": rng.random() < 0.5}


def _experts(rng: random.Random, is_cut: bool) -> tuple[int, int, int]:
    """Experts, how many a token chooses, and the width of one."""
    count = rng.choice([4, 6, 8]) if is_cut else rng.randint(3, 9)
    return count, rng.choice([2, 3]), _width(rng, is_cut)


def _weights(rng: random.Random) -> Sizes:
    """Choose whether weights of chosen experts sum to 1; a single expert's must not, as its router is to learn."""
    return rng.choice([{"norm_topk_prob": True}, {"norm_topk_prob": False}, _ONE_CHOICE])


def _mixtral(rng: random.Random, is_cut: bool) -> Sizes:
    count, top_k, width = _experts(rng, is_cut)
    return {"num_local_experts": count, "num_experts_per_tok": top_k, "intermediate_size": width}


def _mixtral_window(rng: random.Random, is_cut: bool) -> Sizes:
    return _mixtral(rng, is_cut) | {"sliding_window": rng.choice([None, 3, 7])}


def _qwen(rng: random.Random, is_cut: bool) -> Sizes:
    count, top_k, width = _experts(rng, is_cut)
    dense = rng.choice([{}, {"mlp_only_layers": [0]} if is_cut else {"decoder_sparse_step": 2}])
    sizes = {"num_experts": count, "num_experts_per_tok": top_k, "moe_intermediate_size": width}
    sizes |= {"intermediate_size": _width(rng, is_cut)}
    return QWEN_EXPERTS | sizes | dense | _weights(rng)


def _qwen3_moe(rng: random.Random, is_cut: bool) -> Sizes:
    return _qwen(rng, is_cut) | {"attention_bias": rng.random() < 0.5}


def _qwen2_moe(rng: random.Random, is_cut: bool) -> Sizes:
    shared = {"shared_expert_intermediate_size": _width(rng, is_cut), "qkv_bias": rng.random() < 0.5}
    return _qwen(rng, is_cut) | {"mlp_only_layers": []} | shared


def _olmoe(rng: random.Random, is_cut: bool) -> Sizes:
    count, top_k, width = _experts(rng, is_cut)
    groups, share, head_dim = 2, rng.choice([1, 2, 3]), rng.choice([4, 6, 10])
    groups += 0 if is_cut else rng.choice([-1, 1])
    # The norms of all heads are as wide as the model.
    sizes = {"num_attention_heads": groups * share, "num_key_value_heads": groups, "head_dim": head_dim}
    sizes |= {"hidden_size": groups * share * head_dim, "num_experts": count, "intermediate_size": width}
    sizes |= {"attention_bias": rng.random() < 0.9}
    return sizes | {"num_experts_per_tok": top_k} | _weights(rng)


def _gpt_oss(rng: random.Random, is_cut: bool) -> Sizes:
    yarn = YARN | {"factor": rng.uniform(2.0, 32.0), "truncate": rng.random() < 0.5}
    own = {"sliding_window": rng.choice([1, 3, 7, 50]), "swiglu_limit": rng.choice([0.3, 2.0]), "rope_parameters": yarn}
    return _mixtral(rng, is_cut) | own


def _deepseek(rng: random.Random, is_cut: bool) -> Sizes:
    """As far as V2 and V3 agree."""
    heads, layers = 2 * rng.choice([1, 2, 3]) - (not is_cut), 2 if is_cut else rng.choice([2, 3])
    groups, rotated = rng.choice([2, 4]), rng.choice([2, 6])
    yarn = {"rope_parameters": YARN | {"rope_theta": rng.uniform(50.0, 5000.0), "factor": rng.uniform(2.0, 40.0)}}
    if rng.random() < 0.7:
        yarn["rope_parameters"] |= {"mscale": rng.uniform(0.3, 1.0), "mscale_all_dim": rng.uniform(0.3, 1.5)}
    sizes = {
        "hidden_size": _hidden(rng, heads),
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "num_hidden_layers": layers,
        "first_k_dense_replace": rng.randint(0, layers - 1),
        "q_lora_rank": rng.choice([None, 7]),
        "kv_lora_rank": rng.choice([5, 11]),
        "qk_nope_head_dim": rng.choice([3, 7]),
        "qk_rope_head_dim": rotated,
        # The width of the rotated part.
        "head_dim": rotated,
        "v_head_dim": rng.choice([4, 5, 16]),
        "n_routed_experts": 2 * groups * rng.choice([1, 2]),
        "n_group": groups,
        "topk_group": 2,
        "num_experts_per_tok": rng.choice([2, 3]),
        "n_shared_experts": rng.choice([1, 2, 3]),
        "moe_intermediate_size": _width(rng, is_cut),
        "intermediate_size": _width(rng, is_cut),
        "routed_scaling_factor": rng.choice([1.0, 2.5]),
    }
    return LATENT | sizes | (yarn if rng.random() < 0.7 else {})


def _deepseek_v2(rng: random.Random, is_cut: bool) -> Sizes:
    return _deepseek(rng, is_cut) | EVEN | {"topk_method": rng.choice(["greedy", "group_limited_greedy"])}


def _deepseek_v3(rng: random.Random, is_cut: bool) -> Sizes:
    sizes = _deepseek(rng, is_cut) | {"norm_topk_prob": rng.random() < 0.5, "rope_interleave": rng.random() < 0.5}
    return sizes | (rng.choice([{}, {"n_group": 1, "topk_group": 1}]))


def _windows(rng: random.Random, layers: int) -> Sizes:
    kinds = ["sliding_attention", "full_attention"]
    # With one key the weight is 1, and the queries have no gradient but rounding errors.
    return {"layer_types": [rng.choice(kinds) for _ in range(layers)], "sliding_window": rng.choice([2, 3, 7, 50])}


def _partial(rng: random.Random, head_dim: int) -> Sizes:
    rotated = rng.choice(range(2, head_dim + 1, 2))
    theta = rng.uniform(50.0, 9000.0)
    rope = {"rope_type": "default", "rope_theta": theta, "partial_rotary_factor": rotated / head_dim}
    return {"rope_parameters": rope}


def _sigmoid(rng: random.Random, is_cut: bool, count_key: str) -> Sizes:
    """Experts of the families with DeepSeek-V3's router."""
    groups = rng.choice([1, 2])
    return {
        count_key: 4 * rng.choice([1, 2]),
        "n_group": groups,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": _width(rng, is_cut),
        "intermediate_size": _width(rng, is_cut),
        "norm_topk_prob": rng.random() < 0.5,
        "routed_scaling_factor": rng.choice([1.0, 2.5]),
    }


def _dense_layers(rng: random.Random, is_cut: bool) -> Sizes:
    layers = 2 if is_cut else rng.choice([2, 3])
    return {"num_hidden_layers": layers, "first_k_dense_replace": rng.randint(0, layers - 1)}


def _glm4_moe(rng: random.Random, is_cut: bool) -> Sizes:
    head_dim = rng.choice([4, 6, 10])
    own = {"use_qk_norm": rng.random() < 0.5, "attention_bias": rng.random() < 0.5, "head_dim": head_dim}
    own |= {"n_shared_experts": rng.choice([1, 2]), "num_mtp_layers": 0, **_partial(rng, head_dim)}
    return _sigmoid(rng, is_cut, "n_routed_experts") | _dense_layers(rng, is_cut) | own


def _dots1(rng: random.Random, is_cut: bool) -> Sizes:
    layers = _dense_layers(rng, is_cut)
    own = {"n_shared_experts": rng.choice([1, 2]), "attention_bias": rng.random() < 0.5}
    return _sigmoid(rng, is_cut, "n_routed_experts") | layers | own | _windows(rng, layers["num_hidden_layers"])


def _glm4_moe_lite(rng: random.Random, is_cut: bool) -> Sizes:
    sizes = _deepseek_v3(rng, is_cut)
    dense = sizes.pop("first_k_dense_replace")
    kinds = ["dense"] * dense + ["sparse"] * (sizes["num_hidden_layers"] - dense)
    return sizes | {"mlp_layer_types": kinds}


def _hy_v3(rng: random.Random, is_cut: bool) -> Sizes:
    count, top_k, width = _experts(rng, is_cut)
    layers = 2 if is_cut else rng.choice([2, 3])
    return {
        "num_hidden_layers": layers,
        "mlp_layer_types": ["sparse" if i else rng.choice(["sparse", "dense"]) for i in range(layers)],
        "num_experts": count,
        "num_experts_per_tok": top_k,
        "moe_intermediate_size": width,
        "intermediate_size": _width(rng, is_cut),
        "num_shared_experts": rng.choice([1, 2]),
        "router_scaling_factor": rng.choice([1.0, 2.5]),
        "attention_bias": rng.random() < 0.5,
    }


def _solar_open(rng: random.Random, is_cut: bool) -> Sizes:
    own = {"n_shared_experts": rng.choice([1, 2]), "attention_bias": rng.random() < 0.5}
    return _sigmoid(rng, is_cut, "n_routed_experts") | own


def _minimax_m2(rng: random.Random, is_cut: bool) -> Sizes:
    head_dim = rng.choice([4, 6, 10])
    return _mixtral(rng, is_cut) | {"head_dim": head_dim, **_partial(rng, head_dim)}


def _ernie4_5_moe(rng: random.Random, is_cut: bool) -> Sizes:
    count, top_k, width = _experts(rng, is_cut)
    layers = 2 if is_cut else rng.choice([2, 3])
    return {
        "num_hidden_layers": layers,
        "moe_num_experts": count,
        "moe_k": top_k,
        "moe_intermediate_size": width,
        "intermediate_size": _width(rng, is_cut),
        "moe_num_shared_experts": rng.choice([0, 1, 2]),
        "moe_layer_start_index": rng.randint(0, layers - 1),
        "moe_layer_interval": 1 if is_cut else rng.choice([1, 2]),
    }


def _granite(rng: random.Random, is_cut: bool) -> Sizes:
    keys = ("embedding_multiplier", "residual_multiplier", "logits_scaling", "attention_multiplier")
    own = {key: rng.uniform(0.2, 3.0) if rng.random() < 0.7 else 1.0 for key in keys}
    return _mixtral(rng, is_cut) | own | {"attention_bias": rng.random() < 0.5}


def _granite_shared(rng: random.Random, is_cut: bool) -> Sizes:
    return _granite(rng, is_cut) | {"shared_intermediate_size": rng.choice([0, _width(rng, is_cut)])}


def _hunyuan(rng: random.Random, is_cut: bool) -> Sizes:
    count, top_k, width = _experts(rng, is_cut)
    rope = {
        "rope_type": "dynamic",
        "rope_theta": rng.uniform(50.0, 900.0),
        "alpha": rng.uniform(2.0, 99.0),
        "factor": 1.0,
    }
    stretches = {"rope_parameters": rope} if rng.random() < 0.7 else {}
    own = {"num_experts": count, "moe_topk": top_k, "intermediate_size": width, "attention_bias": rng.random() < 0.5}
    return own | stretches


def _flex_olmo(rng: random.Random, is_cut: bool) -> Sizes:
    # The norm of the output hides the weight of a single expert.
    return _olmoe(rng, is_cut) | {"attention_bias": rng.random() < 0.5, "num_experts_per_tok": 2}


def _exaone_moe(rng: random.Random, is_cut: bool) -> Sizes:
    layers = _dense_layers(rng, is_cut)
    own = {"num_shared_experts": rng.choice([1, 2]), **_windows(rng, layers["num_hidden_layers"])}
    return _sigmoid(rng, is_cut, "num_experts") | layers | own


def _afmoe(rng: random.Random, is_cut: bool) -> Sizes:
    count, top_k, width = _experts(rng, is_cut)
    layers = 2 if is_cut else rng.choice([2, 3])
    return {
        "num_hidden_layers": layers,
        "num_dense_layers": rng.randint(0, layers - 1),
        "num_experts": count,
        "num_experts_per_tok": top_k,
        "moe_intermediate_size": width,
        "intermediate_size": _width(rng, is_cut),
        "num_shared_experts": rng.choice([1, 2]),
        "route_scale": rng.choice([1.0, 2.5]),
        "mup_enabled": rng.random() < 0.5,
        "attention_bias": rng.random() < 0.5,
        **_windows(rng, layers),
    }


def _llama4(rng: random.Random, is_cut: bool) -> Sizes:
    count, top_k, width = _experts(rng, is_cut)
    layers = 2 if is_cut else rng.choice([2, 3, 4])
    numbers = [i for i in range(layers) if rng.random() < 0.6] or [0]
    sizes = {
        "num_hidden_layers": layers,
        "num_local_experts": count,
        "num_experts_per_tok": rng.choice([1, top_k]),
        "intermediate_size": width,
        "intermediate_size_mlp": _width(rng, is_cut),
        "moe_layers": numbers,
        "no_rope_layers": [rng.choice([0, 1]) for _ in range(layers - 1)] + [1],
        "attention_chunk_size": rng.choice([3, 5, 50]),
        "use_qk_norm": rng.random() < 0.6,
        "attn_temperature_tuning": rng.random() < 0.6,
        "floor_scale": rng.choice([1, 3, 7]),
        "attn_scale": rng.choice([0.1, 0.8]),
        "attention_bias": rng.random() < 0.5,
    }
    kinds = ["chunked_attention", "full_attention"]
    return sizes | rng.choice([{}, {"layer_types": [rng.choice(kinds) for _ in range(layers)]}])


def _longcat(rng: random.Random, is_cut: bool) -> Sizes:
    heads, rotated = 2 * rng.choice([1, 2, 3]) - (not is_cut), rng.choice([2, 6])
    layers = 2 if is_cut else rng.choice([1, 2])
    scaling = {"rope_parameters": YARN | {"mscale": rng.uniform(0.3, 1.0), "mscale_all_dim": rng.uniform(0.3, 1.5)}}
    sizes = {
        "hidden_size": _hidden(rng, heads),
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "num_hidden_layers": 2 * layers,
        "num_layers": layers,
        "ffn_hidden_size": _width(rng, is_cut),
        "expert_ffn_hidden_size": _width(rng, is_cut),
        "n_routed_experts": rng.choice([4, 6]),
        "zero_expert_num": rng.choice([0, 3]),
        "moe_topk": rng.choice([2, 3]),
        "q_lora_rank": rng.choice([5, 7]),
        "kv_lora_rank": rng.choice([5, 11]),
        "qk_nope_head_dim": rng.choice([3, 7]),
        "qk_rope_head_dim": rotated,
        "head_dim": rotated,
        "v_head_dim": rng.choice([4, 5, 16]),
        "routed_scaling_factor": rng.choice([1.0, 2.5]),
    }
    return sizes | (scaling if rng.random() < 0.5 else {})


def _deepseek_v32(rng: random.Random, is_cut: bool) -> Sizes:
    own = {
        "index_topk": rng.choice([3, 5, 9]),
        "index_n_heads": rng.choice([14, 16]),
        "index_head_dim": rng.choice([6, 11]),
    }
    return _glm4_moe_lite(rng, is_cut) | own | {"q_lora_rank": rng.choice([5, 7]), "rope_interleave": True}


def _glm_moe_dsa(rng: random.Random, is_cut: bool) -> Sizes:
    return _deepseek_v32(rng, is_cut) | {"index_topk_freq": 1 if is_cut else rng.choice([1, 2, 3])}


def _kinds(rng: random.Random, layers: int, linear: str) -> list[str]:
    """Draw the types of the layers; the first or the last is linear."""
    kinds = [linear, "full_attention"][:: rng.choice([1, -1])]
    return [kinds[i % 2] for i in range(layers)]


def _linear_heads(rng: random.Random, is_cut: bool) -> Sizes:
    keys = 2 if is_cut else rng.choice([1, 2, 3])
    return {
        "linear_num_key_heads": keys,
        "linear_num_value_heads": keys * rng.choice([1, 2]),
        "linear_key_head_dim": rng.choice([3, 5, 8]),
        "linear_value_head_dim": rng.choice([4, 7]),
        "linear_conv_kernel_dim": rng.choice([2, 4]),
        # The recurrence of transformers is in float32 in every model.
        "initializer_range": 0.1,
    }


def _qwen3_5_moe(rng: random.Random, is_cut: bool) -> Sizes:
    count, top_k, width = _experts(rng, is_cut)
    layers = 2 if is_cut else rng.choice([2, 3])
    head_dim = rng.choice([4, 6, 10])
    return {
        **_linear_heads(rng, is_cut),
        "num_hidden_layers": layers,
        "layer_types": _kinds(rng, layers, "linear_attention"),
        "num_experts": count,
        "num_experts_per_tok": top_k,
        "moe_intermediate_size": width,
        "shared_expert_intermediate_size": _width(rng, is_cut),
        "head_dim": head_dim,
        **_partial(rng, head_dim),
    }


def _lfm2_moe(rng: random.Random, is_cut: bool) -> Sizes:
    count, top_k, width = _experts(rng, is_cut)
    layers = 2 if is_cut else rng.choice([2, 3])
    heads = 2 * rng.choice([1, 2, 3])
    return {
        "num_hidden_layers": layers,
        "layer_types": _kinds(rng, layers, "conv"),
        "hidden_size": heads * rng.choice([4, 6, 10]),
        "num_attention_heads": heads,
        "num_key_value_heads": rng.choice([2, heads]),
        "num_dense_layers": rng.randint(0, layers - 1),
        "num_experts": count,
        "num_experts_per_tok": top_k,
        "moe_intermediate_size": width,
        "intermediate_size": _width(rng, is_cut),
        "conv_L_cache": rng.choice([2, 3, 5]),
        "conv_bias": rng.random() < 0.5,
        "norm_topk_prob": rng.random() < 0.5,
        "use_expert_bias": rng.random() < 0.5,
        "routed_scaling_factor": rng.choice([1.0, 2.5]),
    }


def _bailing_hybrid(rng: random.Random, is_cut: bool) -> Sizes:
    sizes = _deepseek_v3(rng, is_cut)
    layers = sizes["num_hidden_layers"]
    sizes["num_local_experts"] = sizes.pop("n_routed_experts")
    sizes.pop("rope_interleave")
    return sizes | {
        "layer_types": _kinds(rng, layers, "linear_attention"),
        "head_dim": rng.choice([3, 6]),
        "short_conv_kernel_size": rng.choice([2, 4]),
        "kda_safe_gate": rng.random() < 0.5,
        "kda_lower_bound": rng.choice([-5.0, -1.5]),
        "num_mtp_layers": 0,
        "tie_word_embeddings": False,
        "initializer_range": 0.1,
    }


def _phi_moe(rng: random.Random, is_cut: bool) -> Sizes:
    count, _, width = _experts(rng, is_cut)
    sizes: Sizes = {
        "num_local_experts": count,
        "intermediate_size": width,
        "attention_bias": rng.random() < 0.5,
        "lm_head_bias": rng.random() < 0.7,
        "sliding_window": rng.choice([None, 5]),
        "router_jitter_noise": rng.choice([0.01, 0.4]),
        "max_position_embeddings": 64,
    }
    if rng.random() < 0.7:
        return sizes | {"head_dim": 4, "rope_parameters": LONGROPE | {"rope_theta": rng.uniform(50.0, 900.0)}}
    return sizes


def _filed(family: Family) -> Callable[[random.Random, bool], Sizes]:
    """Options of the file of a family: a size that an axis cuts is even where there is an even value."""

    def draw(rng: random.Random, is_cut: bool) -> Sizes:
        sizes = {}
        for key, values in options_of(family).items():
            even = [value for value in values if _is_even(value)]
            sizes[key] = rng.choice(even if is_cut and even else values)
        return sizes

    return draw


def _is_even(value: Any) -> bool:
    """Return whether two ranks divide a width; a list has one for each model."""
    counts = value if isinstance(value, list) else [value]
    return all(isinstance(one, int) and not isinstance(one, bool) and one % 2 == 0 for one in counts)


NEWER_FAMILIES = {
    **{name: _filed(family) for name, family in FILED.items()},
    "phi-moe": _phi_moe,
    "qwen3-5-moe": _qwen3_5_moe,
    "lfm2-moe": _lfm2_moe,
    "bailing-hybrid": _bailing_hybrid,
    "longcat-flash": _longcat,
    "llama4": _llama4,
    "glm4-moe": _glm4_moe,
    "dots1": _dots1,
    "glm4-moe-lite": _glm4_moe_lite,
    "hy-v3": _hy_v3,
    "solar-open": _solar_open,
    "minimax-m2": _minimax_m2,
    "ernie4-5-moe": _ernie4_5_moe,
    "granite-moe": _granite,
    "granite-moe-shared": _granite_shared,
    "hunyuan-moe": _hunyuan,
    "flex-olmo": _flex_olmo,
    "exaone-moe": _exaone_moe,
    "afmoe": _afmoe,
    "deepseek-v32": _deepseek_v32,
    "glm-moe-dsa": _glm_moe_dsa,
}
"""How each newer family draws its own sizes; its blocks are in the families below, so most of its tests are slow."""
FAMILIES = {
    "llama": _dense_biased,
    "qwen2": _dense,
    "qwen3": _dense_biased,
    "mixtral": _mixtral_window,
    "qwen2-moe": _qwen2_moe,
    "qwen3-moe": _qwen3_moe,
    "olmoe": _olmoe,
    "gpt-oss": _gpt_oss,
    "deepseek-v2": _deepseek_v2,
    "deepseek-v3": _deepseek_v3,
}
"""How each family draws its own sizes."""
