"""Integrity of a checkpoint: its files against the manifest by size and hash, its description, index and shards."""

from pathlib import Path
from typing import TYPE_CHECKING

from moefold.checkpoint.checkpoint_meta import META_FILE
from moefold.checkpoint.manifest import MANIFEST_FILE, read_manifest, validate_hashes, validate_sizes
from moefold.errors import ConfigError
from moefold.message_text import format_list

if TYPE_CHECKING:
    from moefold.comm.groups import World


def quick_validate(path: Path) -> list[str]:
    """Return the defects of a checkpoint that file sizes and the content of `META_FILE` reveal."""
    try:
        manifest = read_manifest(path)
    except OSError as error:
        return [f"its {MANIFEST_FILE} cannot be read: {error.strerror}"]
    except ValueError as error:
        return [f"its {MANIFEST_FILE} cannot be read: {error}"]
    if META_FILE not in manifest:
        return [f"its {MANIFEST_FILE} does not name {META_FILE}"]
    return validate_sizes(path, manifest) or validate_hashes(path, manifest, [META_FILE])


def check_file_sizes(path: Path) -> None:
    """Compare the file sizes of a checkpoint with its manifest. It needs no torch.

    Raises:
        ConfigError: a file is missing or has another size, or there is no manifest.
    """
    if faults := quick_validate(path):
        raise ConfigError(f"checkpoint {str(path)!r} is damaged: {format_list(faults)}")


def check_integrity(path: Path, world: "World", *, checks_hashes: bool = True) -> None:
    """Compare the files of a checkpoint with its manifest. It is collective over `world`, which shares the reading.

    Args:
        world: all processes. Each reads a part of the files, a block at a time.
        checks_hashes: compare hashes. Otherwise only sizes and the content of `META_FILE` are compared.

    Raises:
        ConfigError: a file is missing or differs, or there is no manifest. Raised on every process.
    """
    if faults := gather_errors(validate_files(path, world, checks_hashes=checks_hashes), world):
        raise ConfigError(f"checkpoint {str(path)!r} is damaged: {format_list(faults)}")


def gather_errors(errors: list[str], world: "World") -> list[str]:
    """Return the errors of all ranks without duplicates. It is collective."""
    return list(dict.fromkeys(error for texts in world.all_gather_object(errors) for error in texts))


def validate_files(path: Path, world: "World", *, checks_hashes: bool) -> list[str]:
    """Return the defects that this process finds: sizes of all files, and hashes of its part of them."""
    if faults := quick_validate(path):
        return faults
    manifest = read_manifest(path)
    return validate_hashes(path, manifest, list(manifest)[world.rank :: world.size]) if checks_hashes else []


def validate_content(path: Path) -> list[str]:
    """Return the defects of a checkpoint's index, and of the beginning and end of each stored shard."""
    from moefold.checkpoint.safe_metadata import check_tensor_files, read_metadata, shards_of
    from moefold.checkpoint.shard_file import check_shards

    try:
        metadata = read_metadata(path)
        check_tensor_files(path, metadata)
        check_shards(path, shards_of(metadata).values())
    except OSError as error:
        return [f"{error.filename} cannot be read: {error.strerror}"]
    except ValueError as error:
        return [str(error)]
    return []
