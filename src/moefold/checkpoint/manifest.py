"""Checkpoint manifest: `manifest.json` holds the size and SHA-256 hash of each file.

It is written from the files as read back from disk, so a checkpoint with a manifest was once complete and readable.
"""

import hashlib
import json
import stat
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from moefold.bounded_read import MAX_DESCRIPTION_BYTES, open_regular, read_json
from moefold.remote_path import RemotePath

MANIFEST_FILE = "manifest.json"
REMOTE_BLOCK_BYTES = 1 << 24


@dataclass(frozen=True)
class FileDigest:
    """Size and hash of one file."""

    size_bytes: int
    sha256: str


def digest_file(path: Path) -> FileDigest:
    """Read and hash a whole file.

    Raises:
        OSError: the file cannot be read.
    """
    with open_regular(path) as file:
        if not isinstance(path, RemotePath):
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            return FileDigest(file.tell(), digest)
        sha256 = hashlib.sha256()
        # One request for each block.
        while block := file.read(REMOTE_BLOCK_BYTES):
            sha256.update(block)
        return FileDigest(file.tell(), sha256.hexdigest())


def write_manifest(folder: Path, digests: Mapping[str, FileDigest]) -> None:
    """Write the manifest of a checkpoint folder, by file name."""
    files = {name: asdict(record) for name, record in sorted(digests.items())}
    (folder / MANIFEST_FILE).write_text(json.dumps({"files": files}, indent=2) + "\n", encoding="utf-8")


def read_manifest(folder: Path) -> dict[str, FileDigest]:
    """Read the manifest of a checkpoint folder.

    Raises:
        OSError: the manifest cannot be read.
        ValueError: the file is not a manifest, or names a file outside the folder.
    """
    tree = read_json(regular_file(folder, MANIFEST_FILE), MAX_DESCRIPTION_BYTES)
    try:
        records = {
            name: FileDigest(int(entry["size_bytes"]), str(entry["sha256"])) for name, entry in tree["files"].items()
        }
    except (KeyError, TypeError, AttributeError, OverflowError):
        raise ValueError("it is not a manifest") from None
    for name in records:
        check_file_name(folder, name)
    return records


def check_file_name(folder: Path, name: str) -> None:
    """Raise ValueError if a file name leads out of a folder, directly or through a symbolic link."""
    if not name or name != Path(name).name or name == ".." or (folder / name).resolve().parent != folder.resolve():
        raise ValueError(f"file name {name!r} leads out of the folder")


def regular_file(folder: Path, name: str) -> Path:
    """Return the path of a regular file of a folder. Refuse links out of the folder, devices and pipes.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: it is not a regular file.
    """
    path = folder / name
    check_file_name(folder, name)
    if not stat.S_ISREG(path.stat().st_mode):
        raise ValueError(f"{name} is not a plain file")
    return path


def validate_sizes(folder: Path, manifest: Mapping[str, FileDigest]) -> list[str]:
    """Return descriptions of the files that are missing or have another size. It reads no content."""
    sizes = file_sizes(folder)
    faults = []
    for name, record in manifest.items():
        if name not in sizes:
            faults.append(f"file {name} is missing")
        elif sizes[name] != record.size_bytes:
            faults.append(f"file {name} has {sizes[name]} of {record.size_bytes} bytes")
    return faults


def file_sizes(folder: Path) -> dict[str, int]:
    """Return the size of each file of a folder in bytes, by name. A remote folder needs one listing."""
    if isinstance(folder, RemotePath):
        return {entry.name: entry.size_bytes for entry in folder.entries() if not entry.is_dir}
    return {path.name: path.stat().st_size for path in folder.iterdir() if path.is_file()} if folder.is_dir() else {}


def validate_hashes(folder: Path, manifest: Mapping[str, FileDigest], names: Iterable[str]) -> list[str]:
    """Return descriptions of the named files whose content differs from the manifest. It reads the files whole."""
    faults = []
    for name in names:
        try:
            if digest_file(folder / name) != manifest[name]:
                faults.append(f"file {name} has other content than was written")
        except OSError as error:
            faults.append(f"file {name} cannot be read: {error.strerror}")
    return faults
