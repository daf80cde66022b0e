"""Files that exports write to a Hugging Face folder: shards and their index, sidecar files, the manifest with hashes.

An import keeps manifest and sidecar files next to the checkpoint, for the export to compare and to copy.
"""

import hashlib
import json
import math
import shutil
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath
from typing import Any

from moefold.bounded_read import MAX_INDEX_BYTES, read_json
from moefold.checkpoint.find_checkpoint import checkpoint_folder
from moefold.checkpoint.io_errors import translate_io_errors
from moefold.config.model import ModelConfig
from moefold.config.sections.checkpoint import CheckpointConfig
from moefold.config.sections.run import RunConfig
from moefold.convert.families.families import FAMILIES
from moefold.convert.families.family import Family
from moefold.convert.families.mtp import INDEX_FILE, MTP_FILES, SINGLE_FILE, is_mtp_tensor, mtp_layer_numbers
from moefold.convert.families.tensor_mapping import StateDictMapping
from moefold.convert.hf_sidecar_files import SIDECAR_DIR, find_sidecar_dir
from moefold.convert.safetensors_file import DTYPES, FileLayout, TensorLocation
from moefold.convert.weight_sources import group_by_parameters
from moefold.data.input_paths import TEMPLATE_DIR
from moefold.errors import ConfigError
from moefold.folder_files import unsendable_reason
from moefold.remote_path import RemotePath

MANIFEST_FILE = "moefold-manifest.json"
SIDECAR_SUFFIXES = (".json", ".jsonl", ".txt", ".model", ".jinja", ".tiktoken")
"""Suffixes of the sidecar files that are copied: tokenizer, templates, configs. Code and weights are not copied."""
NOT_SIDECARS = (INDEX_FILE, MANIFEST_FILE)


@dataclass(frozen=True)
class ManifestEntry:
    """Tensor of a manifest."""

    file: str
    dtype: str
    shape: tuple[int, ...]
    sha256: str
    passed_over: str = ""
    """Reason why the values are not in a checkpoint, or empty if they are."""


@dataclass(frozen=True)
class Manifest:
    """Contents of a folder, in the order of its files."""

    family: str
    layout: int
    """Index of the experts' layout in the family's layouts."""
    tensors: dict[str, ManifestEntry]
    metadata: dict[str, dict[str, str]] = field(default_factory=dict)
    """Metadata by file, if it differs from the metadata by transformers."""


def write_manifest(path: Path, manifest: Manifest) -> None:
    """Write the manifest into a folder."""
    # Not `asdict`, which would copy every entry.
    tensors = {name: vars(entry) for name, entry in manifest.tensors.items()}
    text = json.dumps({"format": 1, **vars(manifest), "tensors": tensors}, indent=1)
    (path / MANIFEST_FILE).write_text(text + "\n", encoding="utf-8")


def read_manifest(path: Path) -> Manifest | None:
    """Read the manifest of a folder. Return None if there is none. Raise ConfigError if it is broken."""
    try:
        fields = read_json(path / MANIFEST_FILE, MAX_INDEX_BYTES)
        entries = {name: _parse_entry(entry) for name, entry in fields["tensors"].items()}
        family = fields["family"]
        layout = fields["layout"]
        others = fields.get("metadata", {})
        if not isinstance(family, str) or (family in FAMILIES and layout not in range(len(FAMILIES[family].layouts))):
            raise ValueError(layout)
        metadata = {file: {str(key): str(value) for key, value in entries.items()} for file, entries in others.items()}
        return Manifest(family, layout, entries, metadata)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise ConfigError(f"{str(path / MANIFEST_FILE)!r} is broken; remove it, and tensors are not compared") from None


def _parse_entry(entry: Mapping[str, Any]) -> ManifestEntry:
    """Parse one tensor of a manifest. Refuse a file outside of the folder, because an export writes there."""
    file = entry["file"]
    if PurePosixPath(file).name != file or "\\" in file or not file.endswith(".safetensors"):
        raise ValueError(file)
    return ManifestEntry(file, entry["dtype"], tuple(entry["shape"]), entry["sha256"], entry.get("passed_over", ""))


def hash_tensor(location: TensorLocation) -> str:
    """Return the SHA-256 of a tensor's bytes in a file, read block by block."""
    digest = hashlib.sha256()
    for block in location.blocks():
        digest.update(block)
    return digest.hexdigest()


def changed_tensors(manifest: Manifest, hashes: Mapping[str, str]) -> list[str]:
    """Return the tensors whose hashes differ from the manifest."""
    entries = manifest.tensors
    return [name for name, digest in hashes.items() if name in entries and entries[name].sha256 != digest]


def copy_sidecar_files(source: Path, target: Path, *, excluded: Collection[str] = ()) -> list[str]:
    """Copy tokenizer, templates and configs except `excluded`, and return their names.

    Links are followed within the folder, and within a cache of the Hugging Face Hub, whose snapshots consist of links.

    Raises:
        ConfigError: a file cannot be copied, or is a link to another folder.
    """
    copied = []
    with translate_io_errors(f"the tokenizer and configs of {str(source)!r} cannot be copied to {str(target)!r}"):
        target.mkdir(parents=True, exist_ok=True)
        for file in sorted(source.iterdir()) + sorted((source / TEMPLATE_DIR).glob("*.jinja")):
            if file.is_file() and file.suffix in SIDECAR_SUFFIXES and file.name not in (*NOT_SIDECARS, *excluded):
                if reason := unsendable_reason(source, file):
                    raise ConfigError(f"{str(source)!r}: {file.name} {reason}")
                name = str(file.relative_to(source))
                if isinstance(target, RemotePath):
                    (target / name).upload(file)
                else:
                    (target / name).parent.mkdir(exist_ok=True)
                    shutil.copyfile(file, target / name)
                copied.append(name)
    return copied


def copy_index(source: Path, target: Path) -> None:
    """Copy the index of a folder's files. It is not a sidecar file, because other shards need another index."""
    if (source / INDEX_FILE).is_file():
        with translate_io_errors(f"the index of {str(source)!r} cannot be copied to {str(target)!r}"):
            shutil.copyfile(source / INDEX_FILE, target / INDEX_FILE)


def save_sidecar_files(source: Path, run: RunConfig, checkpoint: CheckpointConfig) -> None:
    """Copy the sidecar files of a run's initial weights next to the run's checkpoints."""
    folder = source if (source / "config.json").is_file() else find_sidecar_dir(source)
    target = checkpoint_folder(run, checkpoint) / SIDECAR_DIR
    if folder is not None and not target.exists():
        copy_sidecar_files(folder, target)


MAX_SHARD_BYTES = 5_000_000_000
"""Largest shard, unless a single tensor exceeds it. It is the limit of transformers."""
MODEL_STEM = "model"
MTP_STEM = "moefold-mtp"

TensorSpecs = Mapping[str, tuple[str, tuple[int, ...]]]
"""Dtype name and shape of each tensor by name, in the order of a file."""


def assign_shards(
    mapping: StateDictMapping,
    dtypes: Mapping[str, str],
    model: ModelConfig,
    imported: Manifest | None,
    shard_bytes: int,
    separates_mtp: bool,
) -> dict[str, TensorSpecs]:
    """Assign each tensor to a file and order the tensors.

    Args:
        model: the model, for recognising MTP tensors.
        imported: manifest of an imported folder whose files are restored. With None, or a manifest of other tensors,
            there are new shards in the order of the model.
        shard_bytes: size limit of a new file. 0: a single file.
        separates_mtp: put MTP layers into separate new files, which no index lists.
    """
    tensors = {name: (dtypes[name], shape) for name, shape in mapping.hf_shapes.items()}
    entries = {} if imported is None else {name: entry for name, entry in imported.tensors.items() if name in tensors}
    if entries.keys() == tensors.keys():
        shards: dict[str, dict[str, tuple[str, tuple[int, ...]]]] = {}
        for name, entry in entries.items():
            shards.setdefault(entry.file, {})[name] = tensors[name]
        return dict(shards)
    names = [name for group in group_by_parameters(mapping) for name in group]
    mtp_names = {name for name in names if separates_mtp and is_mtp_tensor(name, model.num_layers)}
    files = _split_shards((name for name in names if name not in mtp_names), tensors, shard_bytes, MODEL_STEM)
    return files | _split_shards((name for name in names if name in mtp_names), tensors, shard_bytes, MTP_STEM)


def needs_mtp_file(model: ModelConfig, family: Family) -> bool:
    """Return whether transformers would report MTP layers in the indexed files as unexpected."""
    unreported = family.mtp_unreported
    return unreported is not None and any(number not in unreported for number in mtp_layer_numbers(model))


def is_mtp_file(file: str) -> bool:
    """Return whether a file holds MTP layers and is not in the index."""
    return fnmatch(file, MTP_FILES)


def write_index(tmp_dir: Path, layouts: Mapping[str, FileLayout], sidecar_dir: Path | None) -> None:
    """Write the index of several files. Copy the original index if it matches."""
    indexed = {name: layout for name, layout in layouts.items() if not is_mtp_file(name)}
    if list(indexed) == [SINGLE_FILE]:
        return
    locations = {name: stored for layout in indexed.values() for name, stored in layout.tensors.items()}
    weight_map = {name: stored.file.name for name, stored in locations.items()}
    size = sum(stored.num_bytes for stored in locations.values())
    if sidecar_dir is not None and _index_matches((sidecar_dir / INDEX_FILE), weight_map, size):
        shutil.copyfile(sidecar_dir / INDEX_FILE, tmp_dir / INDEX_FILE)
        return
    count = sum(math.prod(stored.shape) for stored in locations.values())
    index = {"metadata": {"total_parameters": count, "total_size": size}, "weight_map": weight_map}
    (tmp_dir / INDEX_FILE).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _index_matches(index: Path, weight_map: Mapping[str, str], size: int) -> bool:
    """Return whether an index has this weight map and, if it gives a total size, this size."""
    try:
        content = read_json(index, MAX_INDEX_BYTES)
        return bool(content["weight_map"] == weight_map and content.get("metadata", {}).get("total_size", size) == size)
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
