"""Which tensor goes into which file of an exported folder, and the index of the files."""

import json
import math
import shutil
from collections.abc import Iterable, Mapping
from fnmatch import fnmatch
from pathlib import Path

from moefold.bounded_read import MAX_INDEX_BYTES, read_json
from moefold.config.schema import ModelConfig
from moefold.convert.compare import group_by_parameters
from moefold.convert.further_layer import (
    IGNORED_BY_TRANSFORMERS,
    INDEX_FILE,
    MTP_FILES,
    SINGLE_FILE,
    is_mtp_tensor,
    mtp_layer_numbers,
)
from moefold.convert.manifest import Manifest
from moefold.convert.piece import StateDictMapping
from moefold.convert.safetensors_file import DTYPES, FileLayout

MAX_SHARD_BYTES = 5_000_000_000
"""Files are at most so large, or hold one tensor: the limit of transformers."""
MODEL_STEM, MTP_STEM = "model", "moefold-mtp"

TensorSpecs = Mapping[str, tuple[str, tuple[int, ...]]]
"""Type, as the format spells it, and shape by name, in the order of a file."""


def assign_shards(
    mapping: StateDictMapping,
    dtypes: Mapping[str, str],
    model: ModelConfig,
    imported: Manifest | None,
    shard_bytes: int,
    separates_mtp: bool,
) -> dict[str, TensorSpecs]:
    """The tensors of each file, in its order.

    Args:
        mapping: the tensors.
        dtypes: their types, as the format spells them.
        model: says which of them are of multi-token prediction.
        imported: of an imported folder whose files are to come back; None, or of other tensors: they are cut anew, in the
            order of the model.
        shard_bytes: largest new file; 0 for a single one.
        separates_mtp: whether the layers of multi-token prediction have new files of their own, which no index names.
    """
    tensors = {name: (dtypes[name], shape) for name, shape in mapping.hf_shapes.items()}
    known = {} if imported is None else {name: listed for name, listed in imported.tensors.items() if name in tensors}
    if known.keys() == tensors.keys():
        found: dict[str, dict[str, tuple[str, tuple[int, ...]]]] = {}
        for name, listed in known.items():
            found.setdefault(listed.file, {})[name] = tensors[name]
        return dict(found)
    names = [name for group in group_by_parameters(mapping) for name in group]
    behind = {name for name in names if separates_mtp and is_mtp_tensor(name, model.num_layers)}
    files = _split_shards((name for name in names if name not in behind), tensors, shard_bytes, MODEL_STEM)
    return files | _split_shards((name for name in names if name in behind), tensors, shard_bytes, MTP_STEM)


def needs_mtp_file(model: ModelConfig) -> bool:
    """Whether transformers would report the layers of multi-token prediction as unexpected, found among the others."""
    return any(number not in IGNORED_BY_TRANSFORMERS for number in mtp_layer_numbers(model))


def is_mtp_file(file: str) -> bool:
    """Whether a file is one of those that no index names."""
    return fnmatch(file, MTP_FILES)


def write_index(tmp_dir: Path, layouts: Mapping[str, FileLayout], sidecar_dir: Path | None) -> None:
    """Write the index of several files; the one that came with the weights where it says the same."""
    inside = {name: layout for name, layout in layouts.items() if not is_mtp_file(name)}
    if list(inside) == [SINGLE_FILE]:
        return
    places = {name: stored for layout in inside.values() for name, stored in layout.tensors.items()}
    weight_map = {name: stored.file.name for name, stored in places.items()}
    size = sum(stored.num_bytes for stored in places.values())
    if sidecar_dir is not None and _index_matches((sidecar_dir / INDEX_FILE), weight_map, size):
        shutil.copyfile(sidecar_dir / INDEX_FILE, tmp_dir / INDEX_FILE)
        return
    count = sum(math.prod(stored.shape) for stored in places.values())
    index = {"metadata": {"total_parameters": count, "total_size": size}, "weight_map": weight_map}
    (tmp_dir / INDEX_FILE).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _index_matches(index: Path, weight_map: Mapping[str, str], size: int) -> bool:
    """Whether an index names these places, and no other size than this."""
    try:
        found = read_json(index, MAX_INDEX_BYTES)
        return bool(found["weight_map"] == weight_map and found.get("metadata", {}).get("total_size", size) == size)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _split_shards(names: Iterable[str], tensors: TensorSpecs, shard_bytes: int, stem: str) -> dict[str, TensorSpecs]:
    shards: list[list[str]] = []
    filled = 0
    for name in names:
        dtype, shape = tensors[name]
        size = math.prod(shape) * DTYPES[dtype].itemsize
        if not shards or (shard_bytes and filled + size > shard_bytes):
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    if len(shards) == 1:
        return {f"{stem}.safetensors": {name: tensors[name] for name in sorted(shards[0])}}
    return {
        f"{stem}-{i:05d}-of-{len(shards):05d}.safetensors": {name: tensors[name] for name in sorted(shard)}
        for i, shard in enumerate(shards, 1)
    }
