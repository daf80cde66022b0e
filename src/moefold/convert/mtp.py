"""Multi-token prediction (MTP) layers in a Hugging Face folder. Torch-free.

They come after the layers that num_hidden_layers counts, and are named like them: model.layers.L and on.
"""

import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from moefold.bounded_read import MAX_INDEX_BYTES, open_regular, parse_json, read_json
from moefold.config.model import ModelConfig

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
MTP_FILES = "moefold-mtp*.safetensors"
"""Files with MTP layers next to the files above; no index lists them."""
MAX_HEADER_BYTES = 100_000_000
"""Limit of the safetensors library."""


def mtp_layer_numbers(model: ModelConfig) -> tuple[int, ...]:
    """Return the layer numbers of a model's MTP layers."""
    return tuple(range(model.num_layers, model.num_layers + model.mtp_layers))


def is_mtp_tensor(name: str, num_layers: int) -> bool:
    """Return whether a tensor of a folder belongs to a layer after the last one of the model."""
    found = re.match(r"model\.layers\.(\d{1,9})\.", name)
    return found is not None and int(found[1]) >= num_layers


def drop_absent_mtp(model: ModelConfig, names: Iterable[str] | None) -> ModelConfig:
    """Return the model without MTP layers if config.json counts some and the folder holds none.

    transformers drops MTP layers when it loads and saves a model, but still counts them in config.json.

    Args:
        model: the model of config.json.
        names: names of the folder's tensors; None if unknown.
    """
    if model.mtp_layers and names is not None and not any(is_mtp_tensor(name, model.num_layers) for name in names):
        return replace(model, mtp_layers=0)
    return model


def tensor_names(folder: Path) -> list[str] | None:
    """Return the names of a folder's tensors; None if they cannot be read, which a later reader reports."""
    try:
        if (folder / INDEX_FILE).is_file():
            names = list(read_json(folder / INDEX_FILE, MAX_INDEX_BYTES)["weight_map"])
        else:
            names = _names_in(folder / SINGLE_FILE)
        return names + [name for file in folder.glob(MTP_FILES) for name in _names_in(file)]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _names_in(file: Path) -> list[str]:
    with open_regular(file) as opened:
        length = int.from_bytes(opened.read(8), "little")
        return list(parse_json(opened.read(min(length, MAX_HEADER_BYTES))))
