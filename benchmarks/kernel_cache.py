"""Archive of compiled Triton kernels, for a machine that should not spend its time on compiling them.

An archive has the cubin and metadata of each entry of Triton's cache folder, for launches, and names its compiler and
GPU. With the same compiler the keys of the entries equal the keys of a launch: `Compiler` has all parts of Triton's key
except the kernel and its options. The module needs only the standard library, and Triton if it is installed.
"""

import hashlib
import io
import json
import sys
import tarfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

MANIFEST = "manifest.json"
GROUP = "__grp__"
"""Beginning of the names of files that list the files of a kernel, with absolute paths."""
PACKED_SUFFIXES = (".cubin", ".json")
"""Files of an entry that a launch reads. The others are the stages of compilation."""


def triton_wheel() -> str:
    """Return the version of Triton and the Python that its wheel is for, as "3.6.0 cp312". Its library has the key."""
    try:
        number = version("triton")
    except PackageNotFoundError:
        number = "absent"
    return f"{number} cp{sys.version_info.major}{sys.version_info.minor}"


@dataclass(frozen=True)
class Compiler:
    """Compiler of kernels, as far as their keys in the cache depend on it, or empty without Triton."""

    code: str = ""
    """Hash of Triton's files with its compiled library. Two builds of one version may differ in it."""
    ptxas: str = ""
    """Version of the assembler."""
    environment: tuple[tuple[str, str], ...] = ()
    """Variables of the environment that change kernels."""

    @staticmethod
    def installed(capability: int) -> "Compiler":
        """Return the compiler of this process, for a compute capability times 10."""
        try:
            from triton._C.libtriton import get_cache_invalidating_env_vars
            from triton.backends.nvidia.compiler import get_ptxas_version
            from triton.runtime.cache import triton_key
        except ImportError:
            return Compiler()
        code = hashlib.sha256(triton_key().encode()).hexdigest()
        ptxas = get_ptxas_version(capability).strip().splitlines()[-1]
        return Compiler(code, ptxas, tuple(sorted(get_cache_invalidating_env_vars().items())))


def cached_kernels(folder: Path) -> set[str]:
    """Return the names of the entries of a cache folder that have a compiled kernel."""
    return {path.parent.name for path in folder.glob("*/*.cubin")}


def pack_kernels(folder: Path, archive: Path, capability: int) -> int:
    """Write the kernels of a cache folder into an archive and return their number."""
    names = sorted(cached_kernels(folder))
    compiler = asdict(Compiler.installed(capability))
    manifest = {"triton": triton_wheel(), "compiler": compiler, "capability": capability, "kernels": len(names)}
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
    """Return the list of packed files of a kernel, for another folder."""
    group = json.loads(content)
    names = [name for name in group["child_paths"] if name.endswith(PACKED_SUFFIXES)]
    return json.dumps(group | {"child_paths": {name: f"{folder}{name}" for name in names}}).encode()


def _add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(content)
    tar.addfile(info, io.BytesIO(content))


def unpack_kernels(archive: Path, folder: Path) -> dict[str, Any]:
    """Write the kernels of an archive into a cache folder and return its manifest.

    Raises:
        OSError: the archive cannot be read.
        tarfile.TarError, EOFError, KeyError: the file is not such an archive, or broken.
    """
    with tarfile.open(archive, "r:xz") as tar:
        tar.extractall(folder, filter="data")
    manifest: dict[str, Any] = json.loads((folder / MANIFEST).read_text())
    (folder / MANIFEST).unlink()
    for path in folder.glob(f"*/{GROUP}*"):
        path.write_bytes(_group(path.read_bytes(), f"{path.parent.resolve()}/"))
    return manifest


def misfit(manifest: dict[str, Any], capability: int | None) -> str:
    """Return why the kernels of an archive are not found here, or "" if they should be.

    Args:
        manifest: manifest of the archive.
        capability: compute capability of the GPU, times 10; None without one.
    """
    installed = triton_wheel()
    reasons = []
    if manifest["triton"] != installed:
        reasons.append(f"compiled by Triton {manifest['triton']}, and {installed} is installed")
    else:
        reasons += _other_compiler(manifest)
    if capability is not None and manifest["capability"] != capability:
        reasons.append(f"for sm_{manifest['capability']}, and the GPU is sm_{capability}")
    return "; ".join(reasons)


def _other_compiler(manifest: dict[str, Any]) -> Iterator[str]:
    """Yield the differences between the compiler of an archive and the installed compiler of the same version."""
    if "compiler" not in manifest:
        yield "the archive does not say which build of Triton compiled it"
        return
    packed_with = manifest["compiler"]
    installed = asdict(Compiler.installed(manifest["capability"]))
    if packed_with["code"] != installed["code"]:
        yield f"compiled by another build of Triton {manifest['triton']}"
    if packed_with["ptxas"] != installed["ptxas"]:
        yield f"assembled by ptxas {packed_with['ptxas']}, and {installed['ptxas']} is here"
    variables = [dict(map(tuple, content["environment"])) for content in (packed_with, installed)]
    for name in sorted(variables[0].keys() | variables[1].keys()):
        packed, current = (values.get(name, "unset") for values in variables)
        if packed != current:
            yield f"compiled with {name}={packed}, and it is {current} here"
