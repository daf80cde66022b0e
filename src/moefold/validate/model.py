"""Rules between the sizes of the model."""

import re
from collections.abc import Iterator

from moefold.config.chosen import part_problems
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


MODEL_RULES = (
    validate_layers,
    *SPARSE_ATTENTION_RULES,
    validate_rope,
)
