"""Whether the files of a checkpoint are what was written, asked before anything is made of them. Torch-free."""

from pathlib import Path
from typing import TYPE_CHECKING

from moefold.checkpoint.folder import quick_validate
from moefold.checkpoint.manifest import read_manifest, validate_hashes
from moefold.errors import ConfigError, format_list

if TYPE_CHECKING:
    from moefold.launch.crew import World


def check_file_sizes(path: Path) -> None:
    """Compare the sizes of the files of a checkpoint with its manifest, before torch is there to read them.

    Raises:
        ConfigError: a file is missing or has another size, or there is no manifest.
    """
    if faults := quick_validate(path):
        raise ConfigError(f"checkpoint {str(path)!r} is damaged: {format_list(faults)}")


def check_integrity(path: Path, world: "World", *, checks_hashes: bool = True) -> None:
    """Compare the files of a checkpoint with its manifest; collective over the crew, which shares the reading.

    Args:
        path: the checkpoint.
        world: each process reads a part of the files, a block at a time.
        checks_hashes: compare hashes; else sizes alone, and the content of the description.

    Raises:
        ConfigError: a file is missing or differs, or there is no manifest; on every process alike.
    """
    found = world.all_gather_object(validate_files(path, world, checks_hashes=checks_hashes))
    if faults := list(dict.fromkeys(fault for faults in found for fault in faults)):
        raise ConfigError(f"checkpoint {str(path)!r} is damaged: {format_list(faults)}")


def validate_files(path: Path, world: "World", *, checks_hashes: bool) -> list[str]:
    """What this process finds wrong with the sizes of all files and the content of its part of them."""
    if faults := quick_validate(path):
        return faults
    manifest = read_manifest(path)
    return validate_hashes(path, manifest, list(manifest)[world.rank :: world.size]) if checks_hashes else []
