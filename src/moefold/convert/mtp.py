"""The layers of multi-token prediction in a Hugging Face folder, which lie behind those that num_hidden_layers counts.

They are called as layers of the model are, model.layers.L and on. Torch-free.
"""

import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from moefold.bounded_read import MAX_INDEX_BYTES, open_regular, parse_json, read_json
from moefold.config.schema import ModelConfig

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
MTP_FILES = "moefold-mtp*.safetensors"
"""Files beside these with the layers of multi-token prediction, which no index names."""
IGNORED_BY_TRANSFORMERS = (61,)
"""The only such layer that transformers 5 does not report as unexpected: that of DeepSeek-V3 itself
(`_keys_to_ignore_on_load_unexpected` of DeepseekV3PreTrainedModel)."""
MAX_HEADER_BYTES = 100_000_000
"""As in the library of safetensors."""


def mtp_layer_numbers(model: ModelConfig) -> tuple[int, ...]:
    """The numbers of a model's layers of multi-token prediction."""
    return tuple(range(model.num_layers, model.num_layers + model.mtp_layers))


def is_mtp_tensor(name: str, num_layers: int) -> bool:
    """Whether a tensor of a folder is in a layer behind the last one of the model."""
    found = re.match(r"model\.layers\.(\d{1,9})\.", name)
    return found is not None and int(found[1]) >= num_layers


def drop_absent_mtp(model: ModelConfig, names: Iterable[str] | None) -> ModelConfig:
    """The model that a folder holds: without further layers where config.json counts some and none is there.

    transformers leaves such layers out when it loads and saves a model, and counts them in config.json all the same.

    Args:
        model: what config.json means.
        names: of the tensors of the folder; None where they are not known.
    """
    if model.mtp_layers and names is not None and not any(is_mtp_tensor(name, model.num_layers) for name in names):
        return replace(model, mtp_layers=0)
    return model


def tensor_names(folder: Path) -> list[str] | None:
    """The names of the tensors of a folder; None if it has none that can be read, which its reader will explain."""
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
