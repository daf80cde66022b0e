"""Archive of compiled Triton kernels, for a machine that should not spend its time on compiling them.

An archive has what a launch needs (cubin and metadata) of each entry of Triton's cache folder, and says what it was
compiled by and for. The keys of the entries equal the keys of a launch where Triton is the same wheel. Needs the
standard library alone.
"""

import io
import json
import sys
import tarfile
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

MANIFEST = "manifest.json"
GROUP = "__grp__"
"""Beginning of the names of files that list the files of a kernel, with absolute paths."""
PACKED_SUFFIXES = (".cubin", ".json")
"""Files of an entry that a launch reads; the others are the stages of compilation."""


def triton_wheel() -> str:
    """Return the version of Triton and the Python that its wheel is for, as "3.6.0 cp312"; its library has the key."""
    try:
        number = version("triton")
    except PackageNotFoundError:
        number = "absent"
    return f"{number} cp{sys.version_info.major}{sys.version_info.minor}"


def cached_kernels(folder: Path) -> set[str]:
    """Return the names of the entries of a cache folder that have a compiled kernel."""
    return {path.parent.name for path in folder.glob("*/*.cubin")}


def pack_kernels(folder: Path, archive: Path, capability: int) -> int:
    """Write the kernels of a cache folder into an archive; return their number."""
    names = sorted(cached_kernels(folder))
    manifest = {"triton": triton_wheel(), "capability": capability, "kernels": len(names)}
    with tarfile.open(archive, "w:xz") as tar:
        _add(tar, MANIFEST, json.dumps(manifest).encode())
        for name in names:
            for file, content in _packed_files(folder / name):
                _add(tar, f"{name}/{file}", content)
    return len(names)


def _packed_files(entry: Path) -> Iterator[tuple[str, bytes]]:
    for path in sorted(entry.iterdir()):
        if path.suffix in PACKED_SUFFIXES:
            content = path.read_bytes()
            yield path.name, _group(content, "") if path.name.startswith(GROUP) else content


def _group(content: bytes, folder: str) -> bytes:
    """Return the list of files of a kernel, those that are packed, in another folder."""
    group = json.loads(content)
    names = [name for name in group["child_paths"] if name.endswith(PACKED_SUFFIXES)]
    return json.dumps(group | {"child_paths": {name: f"{folder}{name}" for name in names}}).encode()


def _add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(content)
    tar.addfile(info, io.BytesIO(content))


def unpack_kernels(archive: Path, folder: Path) -> dict[str, Any]:
    """Write the kernels of an archive into a cache folder; return its manifest.

    Raises:
        OSError: the archive cannot be read.
        tarfile.TarError, EOFError, KeyError: it is no such archive, or broken.
    """
    with tarfile.open(archive, "r:xz") as tar:
        tar.extractall(folder, filter="data")
    manifest: dict[str, Any] = json.loads((folder / MANIFEST).read_text())
    (folder / MANIFEST).unlink()
    for path in folder.glob(f"*/{GROUP}*"):
        path.write_bytes(_group(path.read_bytes(), f"{path.parent.resolve()}/"))
    return manifest


def misfit(manifest: dict[str, Any], capability: int | None) -> str:
    """Return why the kernels of an archive are not found here; "" if they should be.

    Args:
        manifest: of the archive.
        capability: compute capability of the GPU, times 10; None without one.
    """
    here = triton_wheel()
    reasons = (
        [f"compiled by Triton {manifest['triton']}, and {here} is installed"] if manifest["triton"] != here else []
    )
    if capability is not None and manifest["capability"] != capability:
        reasons.append(f"for sm_{manifest['capability']}, and the GPU is sm_{capability}")
    return "; ".join(reasons)
