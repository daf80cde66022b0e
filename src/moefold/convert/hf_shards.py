"""Which tensor goes into which file of an exported folder, and the index of the files.

The list of the tensors of a Hugging Face folder with shapes, types and hashes, and the files that travel along.
"""

import hashlib
import json
import math
import shutil
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath
from typing import Any

from moefold.bounded_read import MAX_INDEX_BYTES, read_json
from moefold.checkpoint.checkpoint_dir import checkpoint_folder
from moefold.checkpoint.save_load import translate_io_errors
from moefold.config.schema import Config, ModelConfig
from moefold.convert.families import FAMILIES
from moefold.convert.hf_folder import SIDECAR_DIR, find_sidecar_dir
from moefold.convert.mtp import (
    IGNORED_BY_TRANSFORMERS,
    INDEX_FILE,
    MTP_FILES,
    SINGLE_FILE,
    is_mtp_tensor,
    mtp_layer_numbers,
)
from moefold.convert.safetensors_file import DTYPES, FileLayout, TensorLocation, read_blocks
from moefold.convert.tensor_mapping import StateDictMapping
from moefold.convert.verify_weights import group_by_parameters
from moefold.errors import ConfigError

MANIFEST_FILE = "moefold-manifest.json"
SIDECAR_SUFFIXES = (".json", ".jsonl", ".txt", ".model", ".jinja", ".tiktoken")
"""Suffixes of the files that travel: tokenizer, templates, configs. Code and weights do not."""
NOT_SIDECARS = (INDEX_FILE, MANIFEST_FILE)


@dataclass(frozen=True)
class ManifestEntry:
    """One tensor of a folder."""

    file: str
    dtype: str
    shape: tuple[int, ...]
    sha256: str
    passed_over: str = ""
    """Why its values are not in a checkpoint; empty if they are."""


@dataclass(frozen=True)
class Manifest:
    """What a folder holds, in the order of its files."""

    family: str
    layout: int
    """Which of the family's layouts the experts have."""
    tensors: dict[str, ManifestEntry]
    metadata: dict[str, dict[str, str]] = field(default_factory=dict)
    """What the files say beside their tensors, by file, where it is not what transformers writes."""


def write_manifest(path: Path, manifest: Manifest) -> None:
    """Write it into a folder."""
    text = json.dumps({"format": 1, **asdict(manifest)}, indent=1)
    (path / MANIFEST_FILE).write_text(text + "\n", encoding="utf-8")


def read_manifest(path: Path) -> Manifest | None:
    """The manifest of a folder; None if it has none.

    Raises:
        ConfigError: it is broken.
    """
    try:
        fields = read_json(path / MANIFEST_FILE, MAX_INDEX_BYTES)
        listed = {name: _listed(entry) for name, entry in fields["tensors"].items()}
        family, layout, others = fields["family"], fields["layout"], fields.get("metadata", {})
        if not isinstance(family, str) or (family in FAMILIES and layout not in range(len(FAMILIES[family].layouts))):
            raise ValueError(layout)
        metadata = {file: {str(key): str(value) for key, value in found.items()} for file, found in others.items()}
        return Manifest(family, layout, listed, metadata)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise ConfigError(f"{str(path / MANIFEST_FILE)!r} is broken; remove it, and tensors are not compared") from None


def _listed(entry: Mapping[str, Any]) -> ManifestEntry:
    """One tensor of a manifest. Its file, into which an export would write, is one of the folder itself.

    Raises:
        ValueError: it is not.
    """
    file = entry["file"]
    if PurePosixPath(file).name != file or "\\" in file or not file.endswith(".safetensors"):
        raise ValueError(file)
    return ManifestEntry(file, entry["dtype"], tuple(entry["shape"]), entry["sha256"], entry.get("passed_over", ""))


def hash_tensor(location: TensorLocation) -> str:
    """SHA-256 of the bytes of a tensor in a file, a block at a time."""
    digest = hashlib.sha256()
    for block in read_blocks(location):
        digest.update(block)
    return digest.hexdigest()


def changed_tensors(manifest: Manifest, hashes: Mapping[str, str]) -> list[str]:
    """The tensors whose bytes are not those that the manifest lists."""
    known = manifest.tensors
    return [name for name, found in hashes.items() if name in known and known[name].sha256 != found]


def copy_sidecar_files(source: Path, target: Path, *, excluded: Collection[str] = ()) -> list[str]:
    """Copy tokenizer, templates and configs, but for some; returns their names.

    Links are followed within the folder, and within a cache of the hub, whose snapshots are full of them.

    Raises:
        ConfigError: the disk refuses, or a file is a link to elsewhere.
    """
    home = (source.parent.parent if source.parent.name == "snapshots" else source).resolve()
    copied = []
    with translate_io_errors(f"the tokenizer and configs of {str(source)!r} cannot be copied to {str(target)!r}"):
        target.mkdir(parents=True, exist_ok=True)
        for file in sorted(source.iterdir()):
            if file.is_file() and file.suffix in SIDECAR_SUFFIXES and file.name not in (*NOT_SIDECARS, *excluded):
                if not file.resolve().is_relative_to(home):
                    raise ConfigError(
                        f"{str(source)!r}: {file.name} is a link that leads out of it; copy the file itself"
                    )
                shutil.copyfile(file, target / file.name)
                copied.append(file.name)
    return copied


def copy_index(source: Path, target: Path) -> None:
    """Copy the index of a folder's files, which is no companion: other files have another one."""
    if (source / INDEX_FILE).is_file():
        with translate_io_errors(f"the index of {str(source)!r} cannot be copied to {str(target)!r}"):
            shutil.copyfile(source / INDEX_FILE, target / INDEX_FILE)


def save_sidecar_files(source: Path, cfg: Config) -> None:
    """Put what came with the weights that a run starts from beside the run's checkpoints."""
    found = source if (source / "config.json").is_file() else find_sidecar_dir(source)
    target = checkpoint_folder(cfg) / SIDECAR_DIR
    if found is not None and not target.exists():
        copy_sidecar_files(found, target)


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
