"""Rules between the sizes of the model."""

from collections.abc import Iterator

from moefold.config.layer_words import parse_layers
from moefold.config.model import ModelConfig
from moefold.config.part import Part
from moefold.config.problem import Problem
from moefold.config.rule import part_problems
from moefold.config.schema import Config
from moefold.validate.sparse import SPARSE_ATTENTION_RULES


def validate_layer_words(model: ModelConfig) -> Iterator[str]:
    """Check the names and the number of the layers."""
    try:
        parse_layers(model.layers)
    except ValueError as error:
        yield f"model.layers={model.layers!r} {error}"


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
