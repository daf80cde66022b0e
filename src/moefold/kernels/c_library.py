"""C sources of this package as libraries, built once on each machine by the compiler that it has."""

import contextlib
import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import uuid
from functools import cache
from pathlib import Path

from moefold.data.cache import cache_folders

COMPILERS = ("gcc", "cc", "clang")
"""In this order; gcc's threads are those that torch has on Linux."""
COMPILE_TIMEOUT_S = 60
VECTORS = ("-fno-trapping-math", "-fno-math-errno", "-ffinite-math-only", "-fno-signed-zeros")
"""What lets comparisons become minima and maxima: without it gcc 12 makes vectors of them with AVX-512 alone, and the
gate takes four to eight times as long with AVX2. Sums keep their order, and sources may not ask whether a number is
one."""


class CompilerError(Exception):
    """There is no library, and this is why, in a few words."""


@cache
def c_library(name: str) -> ctypes.CDLL:
    """The library of `<name>.c` beside this file: found in the cache of this user, or compiled now, in half a second.

    An entry is named by its source with all headers, its compiler and the processor, whose instructions it uses. Ranks
    that want it at once each write one, and rename it whole.

    Raises:
        CompilerError: there is no compiler, it fails, or the library cannot be loaded.
    """
    source = Path(__file__).with_name(f"{name}.c")
    command = _command()
    sources = [path.read_text(encoding="ascii") for path in (source, *sorted(source.parent.glob("*.h")))]
    identity = (*sources, *command, _version(command[0]), _processor())
    file_name = f"{name}-{hashlib.sha256(repr(identity).encode()).hexdigest()[:32]}.so"
    for folder in cache_folders(None):
        library = folder / file_name
        try:
            if not library.is_file():
                folder.mkdir(parents=True, exist_ok=True, mode=0o700)
                _compile(command, source, library)
            return ctypes.CDLL(str(library))
        except OSError:
            # Not to be written, or of a file system from which nothing runs.
            continue
    try:
        with tempfile.TemporaryDirectory(prefix="moefold-") as folder_name:
            library = Path(folder_name, file_name)
            _compile(command, source, library)
            return ctypes.CDLL(str(library))
    except OSError as error:
        raise CompilerError(f"what {command[0]} built cannot be loaded ({error})") from None


def _command() -> list[str]:
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        raise CompilerError(f"there is no C compiler ({', '.join(COMPILERS)})")
    # Another compiler's threads would be a second set beside those of torch.
    has_torchs_threads = platform.system() == "Linux" and Path(compiler).name == "gcc"
    native = "-mcpu=native" if platform.machine() in ("arm64", "aarch64") else "-march=native"
    threads = "-fopenmp" if has_torchs_threads else "-fopenmp-simd"
    return [compiler, "-O3", native, *VECTORS, threads, "-shared", "-fPIC"]


def _version(compiler: str) -> str:
    return _output([compiler, "--version"])


def _processor() -> str:
    """What tells processors with other instructions apart."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="ascii", errors="replace").splitlines() if cpuinfo.exists() else []
    named = [line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part"))]
    return "\n".join([platform.machine(), platform.processor(), *sorted(set(named))])


def _compile(command: list[str], source: Path, library: Path) -> None:
    unfinished = library.with_name(f"{library.stem}.{uuid.uuid4().hex}.tmp")
    try:
        # Another user could not put a file there: the folder is this user's alone.
        with unfinished.open("xb"):
            pass
        _output([*command, str(source), "-o", str(unfinished), "-lm"])
        os.replace(unfinished, library)
    finally:
        with contextlib.suppress(FileNotFoundError):
            unfinished.unlink()


def _output(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CompilerError(f"{command[0]} does not run ({error})") from None
    if done.returncode:
        said = done.stderr.strip().splitlines()
        raise CompilerError(f"{command[0]} fails: {said[0] if said else f'exit {done.returncode}'}")
    return done.stdout
