"""The list of the tensors of a Hugging Face folder with shapes, types and hashes, and the files that travel along."""

import hashlib
import json
import shutil
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from moefold.bounded_read import MAX_INDEX_BYTES, read_json
from moefold.checkpoint.folder import checkpoint_folder
from moefold.checkpoint.store import translate_io_errors
from moefold.config.schema import Config
from moefold.convert.companions import SIDECAR_DIR, find_sidecar_dir
from moefold.convert.families import FAMILIES
from moefold.convert.further_layer import INDEX_FILE
from moefold.convert.safetensors_file import TensorLocation, read_blocks
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
