"""Rules between the settings of the data."""

import math
from collections.abc import Iterator

from moefold.config.schema import Config


def validate_data_weights(cfg: Config) -> Iterator[str]:
    """Every path has a share, or none has."""
    data = cfg.data
    if not data.weights:
        return
    num_paths = 1 if isinstance(data.path, str) else len(data.path)
    if len(data.weights) != num_paths:
        yield (
            f"data.weights={list(data.weights)} must have one number for each of the {num_paths} paths of data.path; "
            "list as many, or leave weights out to join the paths by their sizes"
        )
    if not all(0 < weight < math.inf for weight in data.weights):
        yield f"data.weights={list(data.weights)} must be greater than 0; leave out the paths that are to have no share"


def validate_data_source(cfg: Config) -> Iterator[str]:
    """A column and a split are named."""
    data = cfg.data
    if not data.column:
        yield "data.column='' must name the column of the text; the default is 'text'"
    if not data.split:
        yield "data.split='' must name a split; the default is 'train'"
    if data.validation_split and data.validation_split == data.split:
        yield (
            f"data.validation_split={data.validation_split!r} must not be the split that is trained on; "
            "leave it out to hold out data.validation_fraction of it"
        )


def has_validation_split(cfg: Config) -> bool:
    """Whether a split of its own is evaluated on."""
    return cfg.data.kind == "huggingface" and bool(cfg.data.validation_split)


def has_held_out_data(cfg: Config) -> bool:
    """Whether the data has samples to evaluate on."""
    return has_validation_split(cfg) or (cfg.data.validation_fraction > 0 and not cfg.data.streaming)


DATA_RULES = (validate_data_weights, validate_data_source)
