"""Which tensor goes into which file of an exported folder, and the index of the files."""

import json
import math
import shutil
from collections.abc import Iterable, Mapping
from fnmatch import fnmatch
from pathlib import Path

from moefold.bounded_read import INDEX_BYTES, read_json
from moefold.config.schema import ModelConfig
from moefold.convert.compare import work_order
from moefold.convert.further_layer import (
    APART_FILES,
    INDEX_FILE,
    PASSED_BY_TRANSFORMERS,
    SINGLE_FILE,
    further_numbers,
    is_further,
)
from moefold.convert.manifest import Manifest
from moefold.convert.piece import Plan
from moefold.convert.safetensors_file import DTYPES, Layout

SHARD_BYTES = 5_000_000_000
"""Files are at most so large, or hold one tensor: the limit of transformers."""
MODEL_STEM, APART_STEM = "model", "moefold-mtp"

Tensors = Mapping[str, tuple[str, tuple[int, ...]]]
"""Type, as the format spells it, and shape by name, in the order of a file."""


def export_files(
    plan: Plan, dtypes: Mapping[str, str], model: ModelConfig, kept: Manifest | None, shard_bytes: int, apart: bool
) -> dict[str, Tensors]:
    """The tensors of each file, in its order.

    Args:
        plan: the tensors.
        dtypes: their types, as the format spells them.
        model: says which of them are of multi-token prediction.
        kept: of an imported folder whose files are to come back; None, or of other tensors: they are cut anew, in the
            order of the model.
        shard_bytes: largest new file; 0 for a single one.
        apart: whether the layers of multi-token prediction have new files of their own, which no index names.
    """
    tensors = {name: (dtypes[name], shape) for name, shape in plan.their_shapes.items()}
    known = {} if kept is None else {name: listed for name, listed in kept.tensors.items() if name in tensors}
    if known.keys() == tensors.keys():
        found: dict[str, dict[str, tuple[str, tuple[int, ...]]]] = {}
        for name, listed in known.items():
            found.setdefault(listed.file, {})[name] = tensors[name]
        return dict(found)
    names = [name for group in work_order(plan) for name in group]
    behind = {name for name in names if apart and is_further(name, model.num_layers)}
    files = _cut((name for name in names if name not in behind), tensors, shard_bytes, MODEL_STEM)
    return files | _cut((name for name in names if name in behind), tensors, shard_bytes, APART_STEM)


def belongs_apart(model: ModelConfig) -> bool:
    """Whether transformers would report the layers of multi-token prediction as unexpected, found among the others."""
    return any(number not in PASSED_BY_TRANSFORMERS for number in further_numbers(model))


def is_apart(file: str) -> bool:
    """Whether a file is one of those that no index names."""
    return fnmatch(file, APART_FILES)


def write_index(draft: Path, layouts: Mapping[str, Layout], came: Path | None) -> None:
    """Write the index of several files; the one that came with the weights where it says the same."""
    inside = {name: layout for name, layout in layouts.items() if not is_apart(name)}
    if list(inside) == [SINGLE_FILE]:
        return
    places = {name: stored for layout in inside.values() for name, stored in layout.tensors.items()}
    weight_map = {name: stored.file.name for name, stored in places.items()}
    size = sum(stored.num_bytes for stored in places.values())
    if came is not None and _says((came / INDEX_FILE), weight_map, size):
        shutil.copyfile(came / INDEX_FILE, draft / INDEX_FILE)
        return
    count = sum(math.prod(stored.shape) for stored in places.values())
    index = {"metadata": {"total_parameters": count, "total_size": size}, "weight_map": weight_map}
    (draft / INDEX_FILE).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _says(index: Path, weight_map: Mapping[str, str], size: int) -> bool:
    """Whether an index names these places, and no other size than this."""
    try:
        found = read_json(index, INDEX_BYTES)
        return bool(found["weight_map"] == weight_map and found.get("metadata", {}).get("total_size", size) == size)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _cut(names: Iterable[str], tensors: Tensors, shard_bytes: int, stem: str) -> dict[str, Tensors]:
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
