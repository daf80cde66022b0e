"""Rules between the sizes of the model."""

import math
import re
from collections.abc import Iterator

from moefold.config.chosen import part_problems
from moefold.config.model import ModelConfig
from moefold.config.part import Part
from moefold.config.patterns import ATTENTION_KINDS, INDEX_KINDS, LAYER_KINDS, ROPE_KINDS, expand_layer_pattern
from moefold.config.schema import Config
from moefold.config.suggestions import join_with_or, nearest_multiples
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


def validate_layers(cfg: Config) -> Iterator[str]:
    """Check the parts of the layers."""
    parts = dict.fromkeys(part for layer in dict.fromkeys(cfg.model.all_layers) for part in layer.parts())
    problems = (problem for part in parts if isinstance(part, Part) for problem in part_problems(part, cfg))
    yield from dict.fromkeys(map(str, problems))


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


MODEL_RULES = (
    validate_layers,
    *SPARSE_ATTENTION_RULES,
    validate_rope,
    validate_rope_scaling,
)
