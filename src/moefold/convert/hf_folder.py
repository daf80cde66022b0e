"""Hugging Face folders: safetensors files, sidecar files and duplicate tensors.

Sidecar files are the tokenizer, templates and configs. Only safetensors files inside the folder are read, and every
tensor must occur once.
"""

import re
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

from moefold.bounded_read import MAX_INDEX_BYTES, read_json
from moefold.config.model import ModelConfig
from moefold.convert.families.family import Family, MultimodalFolder
from moefold.convert.families.hf_config import (
    QUANTIZATION_KEY,
    find_family,
    multimodal_folder,
    parse_model_config,
    read_hf_config,
    text_config,
)
from moefold.convert.families.mtp import INDEX_FILE, MTP_FILES, SINGLE_FILE, count_mtp_layers
from moefold.convert.quantized_tensors import dequantize_tensors
from moefold.convert.safetensors_file import TensorLocation, read_header
from moefold.data.input_paths import ADAPTER_CONFIG_FILE
from moefold.errors import ConfigError
from moefold.message_text import format_list


@dataclass(frozen=True)
class HfFolder:
    """A Hugging Face folder whose files are consistent."""

    path: Path
    hf_config: dict[str, Any]
    """The object in config.json, unchanged."""
    family: Family
    model: ModelConfig
    """Model config, with the MTP layers that the folder holds."""
    tensors: dict[str, TensorLocation]


def open_hf_folder(path: Path, ignored_keys: Collection[str] = ()) -> HfFolder:
    """Read config.json and the headers of all tensor files without values. `ignored_keys` may have any value.

    Raises:
        ConfigError: as in `read_model_config`. Or there are adapters or no safetensors files, or a file is missing,
            damaged, outside the folder, or inconsistent with the index.
    """
    keys = read_hf_config(path)
    if (path / ADAPTER_CONFIG_FILE).is_file():
        raise ConfigError(
            f"{str(path)!r} has adapters ({ADAPTER_CONFIG_FILE}), which transformers would apply; import them with "
            "`moefold import DIR OUT --base BASE`, or remove the file to read the weights without them"
        )
    model = parse_model_config(keys, path, ignored_keys)
    family = find_family(keys, path)
    quantization = keys.get(QUANTIZATION_KEY) or text_config(keys, family).get(QUANTIZATION_KEY)
    tensors = _read_tensors(path, allows_quantized=quantization is not None)
    for file in sorted(path.glob(MTP_FILES)):
        _add_file(tensors, file)
    if multimodal := multimodal_folder(keys, family):
        tensors = _text_tensors(tensors, multimodal)
    if quantization is not None:
        tensors = dequantize_tensors(tensors, quantization, path)
    return HfFolder(path, keys, family, count_mtp_layers(model, tensors), tensors)


def _text_tensors(tensors: dict[str, TensorLocation], multimodal: MultimodalFolder) -> dict[str, TensorLocation]:
    """Return the tensors of the text model under the names of a folder of only that model, with its rows of each."""
    text_tensors: dict[str, TensorLocation] = {}
    for name, stored in tensors.items():
        alone = multimodal.text_name(name)
        if alone in text_tensors:
            raise ConfigError(f"tensor {name} of {str(stored.file)!r} is there under another name too")
        if re.fullmatch(multimodal.pair_tensors, alone) and stored.shape:
            stored = replace(stored, shape=(stored.shape[0] // 2, *stored.shape[1:]))
        text_tensors[alone] = stored
    return text_tensors


def _add_file(tensors: dict[str, TensorLocation], file: Path) -> None:
    """Add the tensors of a file that is not in the index. Skip indexed files."""
    if any(stored.file == file for stored in tensors.values()):
        return
    header = read_header(file)
    if duplicated := sorted(header.keys() & tensors.keys()):
        files = f"{tensors[duplicated[0]].file.name} and {file.name}"
        raise ConfigError(f"{str(file.parent)!r}: tensor {duplicated[0]} is in two files, {files}")
    tensors |= header


def _read_tensors(path: Path, *, allows_quantized: bool) -> dict[str, TensorLocation]:
    single = path / SINGLE_FILE
    index = path / INDEX_FILE
    if single.exists() and index.exists():
        raise ConfigError(f"{str(path)!r} has both {SINGLE_FILE} and {INDEX_FILE}; remove the one that is stale")
    if single.exists():
        return read_header(single, allows_quantized=allows_quantized)
    if not index.exists():
        pickled = [file.name for pattern in ("*.bin", "*.pt", "*.pth") for file in sorted(path.glob(pattern))]
        if pickled:
            raise ConfigError(
                f"{str(path)!r} holds pickled weights ({format_list(pickled)}), which can run code when they are read; "
                "moefold reads safetensors files only: save the model again with transformers"
            )
        raise ConfigError(
            f"{str(path)!r} holds no weights: neither {SINGLE_FILE} nor {INDEX_FILE}{_describe_contents(path)}"
        )
    return _read_index(path, index, allows_quantized=allows_quantized)


def _describe_contents(path: Path) -> str:
    """Describe the weight files of a folder that lacks the expected files."""
    if links := [name for name in (SINGLE_FILE, INDEX_FILE) if (path / name).is_symlink()]:
        return f"; {links[0]} is a link to nothing: fetch the folder again"
    files = sorted(file.name for file in path.glob("*.safetensors"))
    return f"; it has {format_list(files)}, which nothing names" if files else ""


def _is_inside(folder: Path, file: str) -> bool:
    """Return whether a file in an index is inside the folder, by its name and after resolving links to folders."""
    name = PurePosixPath(file)
    if not file or name.is_absolute() or ".." in name.parts or not name.parts or "\\" in file:
        return False
    return len(name.parts) == 1 or (folder / name).parent.resolve().is_relative_to(folder.resolve())


def _read_index(path: Path, index: Path, *, allows_quantized: bool) -> dict[str, TensorLocation]:
    try:
        file_of = read_json(index, MAX_INDEX_BYTES)["weight_map"]
        bad = sorted({file for file in file_of.values() if not _is_inside(path, file)})
        # "./FILE" is equal to FILE, as in transformers.
        weight_map = {name: str(PurePosixPath(file)) for name, file in file_of.items()}
        files = sorted(set(weight_map.values()))
    except OSError as error:
        raise ConfigError(f"{str(index)!r} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ConfigError(f"{str(index)!r} is not an index of safetensors files") from None
    if bad:
        raise ConfigError(f"{str(index)!r} names files outside its folder: {format_list(bad)}")
    tensors: dict[str, TensorLocation] = {}
    reasons = []
    for file in files:
        if not (path / file).is_file():
            reasons.append(f"file {file}, which the index names, is missing")
            continue
        for name, stored in read_header(path / file, allows_quantized=allows_quantized).items():
            if name in tensors:
                reasons.append(f"tensor {name} is in two files, {tensors[name].file.name} and {file}")
            elif weight_map.get(name) != file:
                reasons.append(f"tensor {name} of {file} is not in the index")
            tensors[name] = stored
    if not reasons:
        reasons = [
            f"tensor {name} is in the index but not in {weight_map[name]}" for name in weight_map.keys() - tensors
        ]
    if reasons:
        raise ConfigError(f"{str(path)!r}: {format_list(sorted(reasons))}")
    return tensors
