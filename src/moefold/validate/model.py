"""Rules between the sizes of the model."""

import re
from collections.abc import Iterator

from moefold.config.model import ModelConfig
from moefold.config.part import Part
from moefold.config.patterns import PATTERNS, expand_layer_pattern
from moefold.config.problem import Problem
from moefold.config.rule import part_problems
from moefold.config.schema import Config
from moefold.validate.sparse import SPARSE_ATTENTION_RULES


def validate_layer_pattern(model: ModelConfig) -> Iterator[str]:
    """Check the syntax of all layer patterns, and that they are no longer than the model."""
    for name, letters in PATTERNS.items():
        yield from _validate_pattern(model, name, letters)


def _validate_pattern(model: ModelConfig, key: str, kinds: str) -> Iterator[str]:
    pattern = getattr(model, key)
    num_layers = model.num_layers
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


def layer_problems(cfg: Config) -> Iterator[Problem]:
    """Yield the broken rules of the parts of the layers."""
    parts = dict.fromkeys(part for layer in dict.fromkeys(cfg.model.all_layers) for part in layer.parts())
    for part in parts:
        if isinstance(part, Part):
            yield from part_problems(part, cfg)


def validate_layers(cfg: Config) -> Iterator[str]:
    """Check the parts of the layers."""
    yield from dict.fromkeys(map(str, layer_problems(cfg)))


MODEL_RULES = (
    validate_layers,
    *SPARSE_ATTENTION_RULES,
)
