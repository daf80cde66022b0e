"""Rules between the sizes of the model."""

import math
import re
from collections.abc import Iterator

from moefold.config.model import ModelConfig
from moefold.config.patterns import ATTENTION_KINDS, INDEX_KINDS, LAYER_KINDS, ROPE_KINDS, expand_layer_pattern
from moefold.config.schema import Config
from moefold.config.suggestions import join_with_or, nearest_multiples, nearest_numbers
from moefold.topology.layout import divisors
from moefold.validate.sparse import SPARSE_ATTENTION_RULES


def validate_layer_pattern(cfg: Config) -> Iterator[str]:
    """Check the syntax of all layer patterns, and that they are no longer than the model."""
    yield from _validate_pattern(cfg, "layer_pattern", LAYER_KINDS)
    yield from _validate_pattern(cfg, "attention_pattern", ATTENTION_KINDS)
    yield from _validate_pattern(cfg, "rope_pattern", ROPE_KINDS)
    yield from _validate_pattern(cfg, "index_pattern", INDEX_KINDS)


def _validate_pattern(cfg: Config, key: str, kinds: str) -> Iterator[str]:
    pattern = getattr(cfg.model, key)
    num_layers = cfg.model.num_layers
    name = f"model.{key}={pattern!r}"
    counts = [int(digits) for digits in re.findall(r"[0-9]{1,18}", pattern)]
    if max(counts, default=0) > num_layers:
        yield f"{name} repeats a layer {max(counts)} times, more than model.num_layers={num_layers}; shorten it"
        return
    try:
        unit = expand_layer_pattern(pattern, kinds)
    except ValueError as error:
        yield f"model.{key}: {error}"
        return
    if len(unit) > num_layers:
        yield (
            f"{name} spells {len(unit)} layers, more than model.num_layers={num_layers}; "
            f"shorten it or set model.num_layers={len(unit)}"
        )


def validate_heads(cfg: Config) -> Iterator[str]:
    """Check that heads divide the hidden size if head_dim is unset, and that query groups divide the heads."""
    model = cfg.model
    if model.attention == "mla" or not model.has_softmax_attention:
        return
    hidden = model.hidden_size
    heads = model.num_attention_heads
    groups = model.num_query_groups
    if model.head_dim == 0 and hidden % heads:
        yield (
            f"model.num_attention_heads={heads} must divide model.hidden_size={hidden} when model.head_dim is 0; "
            f"choose {nearest_numbers(heads, divisors(hidden))} heads, model.hidden_size="
            f"{nearest_multiples(hidden, heads)}, or set model.head_dim"
        )
    if heads % groups:
        yield (
            f"model.num_query_groups={groups} must divide model.num_attention_heads={heads}; "
            f"choose {nearest_numbers(groups, divisors(heads))}"
        )


def validate_rope(cfg: Config) -> Iterator[str]:
    """Check that RoPE rotates an even number of dims of each head."""
    model = cfg.model
    if not model.has_rope:
        return
    if model.attention == "mla":
        if model.qk_rope_head_dim % 2:
            yield (
                f"model.qk_rope_head_dim={model.qk_rope_head_dim} must be even, because RoPE rotates pairs; "
                f"choose {nearest_multiples(model.qk_rope_head_dim, 2)}"
            )
        return
    size = model.head_size
    source = f"model.head_dim={size}"
    if model.head_dim == 0:
        if model.hidden_size % model.num_attention_heads:
            return
        source = f"the head size hidden_size/num_attention_heads={size}"
    if size % 2:
        yield f"{source} must be even, because RoPE rotates pairs; choose {nearest_multiples(size, 2)}"
        return
    rotated = size * model.rope_fraction
    if abs(rotated - round(rotated)) > 1e-6 or round(rotated) % 2 or round(rotated) < 2:
        even = sorted(range(2, size + 1, 2), key=lambda dims: abs(dims - rotated))[:2]
        yield (
            f"model.rope_fraction={model.rope_fraction} of a head of {size} is {rotated:g} dimensions, which must be a "
            "positive even number; "
            f"choose {join_with_or([f'{dims / size:g} ({dims} dimensions)' for dims in sorted(even)])}"
        )


def validate_rope_scaling(cfg: Config) -> Iterator[str]:
    """Check that RoPE scaling has a factor above 1 and a non-empty frequency band."""
    model = cfg.model
    if model.rope_scaling == "none":
        return
    if model.rope_scaling == "longrope":
        yield from _validate_longrope(model)
        return
    if model.rope_scaling_factor == 1:
        yield (
            f"model.rope_scaling={model.rope_scaling!r} changes nothing with model.rope_scaling_factor=1.0; "
            "give a factor above 1, or choose 'none'"
        )
    if model.rope_scaling == "llama3" and model.rope_low_freq_factor > model.rope_high_freq_factor:
        yield (
            f"model.rope_low_freq_factor={model.rope_low_freq_factor} must be at most "
            f"model.rope_high_freq_factor={model.rope_high_freq_factor}; the published pair is 1.0 and 4.0"
        )
    if model.rope_scaling == "yarn":
        yield from _validate_yarn(model)
    if model.rope_scaling == "ntk" and model.rotary_dim <= 2:
        yield (
            f"model.rope_scaling='ntk' needs more than the {model.rotary_dim} dimensions that RoPE rotates; "
            "choose 'linear', or more dimensions"
        )


def _validate_longrope(model: ModelConfig) -> Iterator[str]:
    """Check that LongRoPE has a positive factor for each rotated pair, and a defined attention factor."""
    pairs = model.rotary_dim // 2
    for key in ("rope_short_factors", "rope_long_factors"):
        factors = getattr(model, key)
        if len(factors) != pairs:
            yield (
                f"model.{key} has {len(factors)} numbers, and model.rope_scaling='longrope' needs one for each of the "
                f"{pairs} pairs of dims that RoPE rotates; give {pairs}"
            )
        elif wrong := [factor for factor in factors if not 0 < factor < math.inf]:
            yield f"model.{key} has the number {wrong[0]}, and divides frequencies; give finite numbers above 0"
    has_factors = model.rope_short_mscale > 0 and model.rope_long_mscale > 0
    if model.rope_original_seq_len == 1 and not has_factors:
        yield (
            "model.rope_original_seq_len=1 has the logarithm 0, by which the attention factor of longrope divides; "
            "give the context length of the first training, or rope_short_mscale and rope_long_mscale"
        )


def _validate_yarn(model: ModelConfig) -> Iterator[str]:
    """Check YaRN: the lowest frequency is scaled, the blend is within the head, and the factors are consistent."""
    fast = model.rope_beta_fast
    slow = model.rope_beta_slow
    seq_len = model.rope_original_seq_len
    if slow > fast:
        yield (
            f"model.rope_beta_slow={slow} must be at most model.rope_beta_fast={fast}; the published pair is 1.0 and "
            "32.0"
        )
        return
    minimum = math.floor(2 * math.pi * slow) + 1
    maximum = math.ceil(2 * math.pi * fast * model.rope_theta) - 1
    if not minimum <= seq_len <= maximum:
        yield (
            f"model.rope_original_seq_len={seq_len} must be above 2*pi*rope_beta_slow and below "
            f"2*pi*rope_beta_fast*rope_theta, so that some frequencies are scaled and some are not; "
            f"choose {minimum} to {maximum}"
        )
    if model.rope_attention_factor and model.rope_mscale:
        yield (
            f"model.rope_mscale={model.rope_mscale} has no effect with model.rope_attention_factor="
            f"{model.rope_attention_factor}, which it would only derive; leave one of them out"
        )
    if model.rope_mscale and not model.rope_mscale_all_dim:
        yield (
            f"model.rope_mscale={model.rope_mscale} is divided by the factor of model.rope_mscale_all_dim, not given; "
            "give both or neither"
        )
    # Under MLA it scales the scores as well.
    if model.rope_mscale_all_dim and not model.rope_mscale and model.attention != "mla":
        yield (
            f"model.rope_mscale_all_dim={model.rope_mscale_all_dim} divides the factor of model.rope_mscale, which is "
            "not given; give both or neither"
        )


def validate_mla(cfg: Config) -> Iterator[str]:
    """Check that MLA (multi-head latent attention) has no QK norm, biases, sinks or scale of the scores."""
    model = cfg.model
    if model.attention != "mla":
        return
    for key, why in (
        ("qk_norm", "which normalises its latents"),
        ("qkv_bias", "which has no biases"),
        ("attention_output_bias", "which has no biases"),
        ("attention_sinks", "which has no sinks"),
    ):
        if getattr(model, key) is True:
            yield f"model.{key}=true does not go with model.attention='mla', {why}; set {key}=false, or attention='gqa'"


def validate_norm_after_rope(cfg: Config) -> Iterator[str]:
    """Check that norms after RoPE are of dims in the order of their weights."""
    model = cfg.model
    if model.qk_norm_after_rope and model.rope_interleaved and model.qk_norm_weight:
        yield (
            "model.qk_norm_after_rope=true does not go with model.rope_interleaved=true, whose rotation reorders the "
            "dims; choose rope_interleaved=false"
        )


def validate_sliding_window(cfg: Config) -> Iterator[str]:
    """Check that layers of kind W have a sliding window."""
    model = cfg.model
    if "W" in model.attention_pattern and model.sliding_window == 0:
        yield (
            f"model.attention_pattern={model.attention_pattern!r} has layers of kind W, which attend to "
            "model.sliding_window=0 tokens; set model.sliding_window, or choose 'F'"
        )


def validate_attention_chunks(cfg: Config) -> Iterator[str]:
    """Check that layers of kind C have chunks, and grouped-query attention."""
    model = cfg.model
    name = f"model.attention_pattern={model.attention_pattern!r}"
    if "C" not in model.attention_pattern:
        return
    if model.attention_chunk_size == 0:
        yield (
            f"{name} has layers of kind C, which attend within model.attention_chunk_size=0 tokens; "
            "set model.attention_chunk_size, or choose 'F'"
        )
    if model.attention == "mla":
        yield f"{name} has layers of kind C, and model.attention='mla' has no chunks; choose 'F' or 'W'"
    if model.index_topk:
        yield (
            f"{name} has layers of kind C, and model.index_topk={model.index_topk} selects keys of the whole document; "
            "choose 'F' or 'W', or index_topk=0"
        )


def validate_norms_without_weights(cfg: Config) -> Iterator[str]:
    """Check that norms of queries and keys without weights are of single heads, and that others are in all layers."""
    model = cfg.model
    if not model.qk_norm:
        return
    if not model.qk_norm_weight and model.qk_norm_width == "all_heads":
        yield (
            "model.qk_norm_weight=false does not go with model.qk_norm_width='all_heads', whose norm has weights; set "
            "qk_norm_width='head'"
        )
    if model.qk_norm_weight and not model.qk_norm_nope:
        yield (
            "model.qk_norm_nope=false does not go with model.qk_norm_weight=true: layers without RoPE would have other "
            "parameters than those with it; set qk_norm_weight=false, or qk_norm_nope=true"
        )


def validate_linear_attention(cfg: Config) -> Iterator[str]:
    """Check the heads of layers of kind L."""
    model = cfg.model
    if not model.has_linear_attention or model.linear_attention == "short_convolution":
        return
    keys = model.linear_num_key_heads
    values = model.linear_num_value_heads
    if values % keys:
        yield (
            f"model.linear_num_value_heads={values} must be a multiple of model.linear_num_key_heads={keys}, each of "
            f"which serves as many; choose {nearest_multiples(values, keys)}"
        )


def validate_zero_centered_norms(cfg: Config) -> Iterator[str]:
    """Check that norms around zero belong to the residual stream and to single heads."""
    model = cfg.model
    if not model.zero_centered_norms:
        return
    if model.norm != "rmsnorm":
        yield (
            f"model.zero_centered_norms=true does not go with model.norm='{model.norm}', whose weights start at 1; set "
            "zero_centered_norms=false, or norm='rmsnorm'"
        )
    if model.attention == "mla":
        yield (
            "model.zero_centered_norms=true does not go with model.attention='mla', whose latents have other norms; "
            "set zero_centered_norms=false, or attention='gqa'"
        )
    if model.qk_norm and model.qk_norm_width == "all_heads":
        yield (
            "model.zero_centered_norms=true does not go with model.qk_norm_width='all_heads', a norm of another kind; "
            "set zero_centered_norms=false, or qk_norm_width='head'"
        )


MODEL_RULES = (
    validate_zero_centered_norms,
    validate_linear_attention,
    *SPARSE_ATTENTION_RULES,
    validate_sliding_window,
    validate_attention_chunks,
    validate_norms_without_weights,
    validate_heads,
    validate_mla,
    validate_norm_after_rope,
    validate_rope,
    validate_rope_scaling,
)
