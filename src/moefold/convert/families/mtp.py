"""Multi-token prediction (MTP) layers in a Hugging Face folder.

They come after the layers that num_hidden_layers counts. They are named like these, model.layers.L and on (DeepSeek),
or mtp.layers.0 and on (Qwen3-Next). moefold reads both layouts from the families with the same computation.
"""

import re
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

from moefold.bounded_read import MAX_INDEX_BYTES, open_regular, parse_json, read_json
from moefold.config.model import ModelConfig

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
MTP_FILES = "moefold-mtp*.safetensors"
"""Files with MTP layers next to the files above. No index lists them."""
MTP_PREFIX = "mtp."
"""Prefix of the tensors of the layout of Qwen3-Next."""
MAX_HEADER_BYTES = 100_000_000
"""Limit of the safetensors library."""


def mtp_layer_numbers(model: ModelConfig) -> tuple[int, ...]:
    """Return the layer numbers of a model's MTP layers."""
    return tuple(range(model.num_layers, model.num_layers + model.mtp_layers))


_LAYER = re.compile(r"model\.layers\.(\d{1,9})\.")


def is_mtp_tensor(name: str, num_layers: int) -> bool:
    """Return whether a tensor of a folder belongs to MTP: to a layer after the last layer, or by its name."""
    if re.match(r"(model\.)?mtp[._]", name):
        return True
    match = _LAYER.match(name)
    return match is not None and int(match[1]) >= num_layers


def uncounted_tensors(names: Collection[str], num_layers: int) -> set[str]:
    """Return the tensors of layers after the last layer that are no MTP layers: other layers hold all their tensors."""
    tensors: dict[int, set[str]] = {}
    for match in filter(None, map(_LAYER.match, names)):
        tensors.setdefault(int(match[1]), set()).add(match.string[match.end() :])
    counted = set().union(*(inner for layer, inner in tensors.items() if layer < num_layers))
    others = {layer: inner for layer, inner in tensors.items() if layer >= num_layers and inner <= counted}
    return {f"model.layers.{layer}.{name}" for layer, inner in others.items() for name in inner}


def count_mtp_layers(model: ModelConfig, names: Collection[str] | None) -> ModelConfig:
    """Return the model with the MTP layers in the folder, given the names of its tensors (None: unknown).

    transformers drops MTP layers when it loads and saves a model, but still counts them in config.json. Folders of
    Qwen3-Next may have a layer that their config.json does not count.
    """
    if names is None:
        return model
    if model.mtp_layers and not any(is_mtp_tensor(name, model.num_layers) for name in names):
        return replace(model, mtp_layers=0)
    if not model.mtp_layers and f"{MTP_PREFIX}layers.0.input_layernorm.weight" in names and has_qwen_mtp(model):
        return replace(model, mtp_layers=1)
    return model


def has_qwen_mtp(model: ModelConfig) -> bool:
    """Return whether the model has an MTP layer like folders of Qwen3-Next: experts and full attention."""
    last = model.decoder_layers[-1]
    is_full = not last.attention.is_recurrent and last.attention.span is None
    return model.norm.zero_centered and last.ffn.is_routed and is_full and not last.attention.shares_selection


def tensor_names(folder: Path) -> list[str] | None:
    """Return the names of a folder's tensors, or None if they cannot be read (a later reader reports it)."""
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
