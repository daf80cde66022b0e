"""Whether the files of a checkpoint are what was written, asked before anything is made of them. Torch-free."""

from pathlib import Path
from typing import TYPE_CHECKING

from moefold.checkpoint.folder import quick_faults
from moefold.checkpoint.manifest import hash_faults, read_manifest
from moefold.errors import ConfigError, some

if TYPE_CHECKING:
    from moefold.launch.crew import Crew


def refuse_cut(path: Path) -> None:
    """Compare the sizes of the files of a checkpoint with its manifest, before torch is there to read them.

    Raises:
        ConfigError: a file is missing or has another size, or there is no manifest.
    """
    if faults := quick_faults(path):
        raise ConfigError(f"checkpoint {str(path)!r} is damaged: {some(faults)}")


def refuse_damaged(path: Path, crew: "Crew", *, reads_all: bool = True) -> None:
    """Compare the files of a checkpoint with its manifest; collective over the crew, which shares the reading.

    Args:
        path: the checkpoint.
        crew: each process reads a part of the files, a block at a time.
        reads_all: compare hashes; else sizes alone, and the content of the description.

    Raises:
        ConfigError: a file is missing or differs, or there is no manifest; on every process alike.
    """
    found = crew.gather(file_faults(path, crew, reads_all=reads_all))
    if faults := list(dict.fromkeys(fault for faults in found for fault in faults)):
        raise ConfigError(f"checkpoint {str(path)!r} is damaged: {some(faults)}")


def file_faults(path: Path, crew: "Crew", *, reads_all: bool) -> list[str]:
    """What this process finds wrong with the sizes of all files and the content of its part of them."""
    if faults := quick_faults(path):
        return faults
    manifest = read_manifest(path)
    return hash_faults(path, manifest, list(manifest)[crew.rank :: crew.size]) if reads_all else []
