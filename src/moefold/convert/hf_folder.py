"""The tensors of a Hugging Face folder: every one found once, inside the folder, in safetensors files only."""

import json
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from moefold.config.schema import ModelConfig
from moefold.convert.families import Family
from moefold.convert.hf_config import family_of, model_of, read_hf_config
from moefold.convert.safetensors_file import Stored, read_header
from moefold.errors import ConfigError, some

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


@dataclass(frozen=True)
class HfFolder:
    """A folder whose files are sound by themselves."""

    path: Path
    keys: dict[str, Any]
    """Of config.json."""
    family: Family
    model: ModelConfig
    tensors: dict[str, Stored]


def open_hf_folder(path: Path) -> HfFolder:
    """Read config.json and the headers of all tensor files; no tensor yet.

    Raises:
        ConfigError: as `read_model_config`; or there are no safetensors files, or one is missing, damaged, outside
            the folder, or at odds with the index.
    """
    keys = read_hf_config(path)
    model = model_of(keys, path)
    family = family_of(keys, path)
    return HfFolder(path, keys, family, model, _read_tensors(path))


def _read_tensors(path: Path) -> dict[str, Stored]:
    single, index = path / SINGLE_FILE, path / INDEX_FILE
    if single.exists() and index.exists():
        raise ConfigError(f"{str(path)!r} has both {SINGLE_FILE} and {INDEX_FILE}; remove the one that is stale")
    if single.exists():
        return read_header(single)
    if not index.exists():
        pickled = [file.name for pattern in ("*.bin", "*.pt", "*.pth") for file in sorted(path.glob(pattern))]
        if pickled:
            raise ConfigError(
                f"{str(path)!r} holds pickled weights ({some(pickled)}), which can run code when they are read; "
                "moefold reads safetensors files only: save the model again with transformers"
            )
        raise ConfigError(f"{str(path)!r} holds no weights: neither {SINGLE_FILE} nor {INDEX_FILE}")
    return _read_index(path, index)


def _read_index(path: Path, index: Path) -> dict[str, Stored]:
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        files = sorted(set(weight_map.values()))
        bad = [file for file in files if PurePosixPath(file).name != file or file in ("", ".", "..") or "\\" in file]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise ConfigError(f"{str(index)!r} is no index of safetensors files") from None
    if bad:
        raise ConfigError(f"{str(index)!r} names files outside its folder: {some(bad)}")
    tensors: dict[str, Stored] = {}
    faults = []
    for file in files:
        if not (path / file).is_file():
            faults.append(f"file {file}, which the index names, is missing")
            continue
        for name, stored in read_header(path / file).items():
            if name in tensors:
                faults.append(f"tensor {name} is in two files, {tensors[name].file.name} and {file}")
            elif weight_map.get(name) != file:
                faults.append(f"tensor {name} of {file} is not in the index")
            tensors[name] = stored
    if not faults:
        faults = [
            f"tensor {name} is in the index but not in {weight_map[name]}" for name in weight_map.keys() - tensors
        ]
    if faults:
        raise ConfigError(f"{str(path)!r}: {some(sorted(faults))}")
    return tensors
