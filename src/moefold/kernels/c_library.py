"""C sources of this package as libraries, built once on each machine by the compiler that it has."""

import contextlib
import ctypes
import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
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
    """The library of `<name>.c` beside this file: found in the cache of this user, or compiled now, in a second or two.

    An entry is named by its source with all headers, its compiler and the processor, whose instructions it uses. It is
    written under another name and renamed whole.

    Raises:
        CompilerError: there is no compiler, it fails, or the library cannot be loaded.
    """
    command, source, file_name = _identified(name)
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


def build_libraries(*names: str) -> None:
    """Have these libraries: what no cache has is compiled side by side, by the first process of a machine to ask.

    Raises:
        CompilerError: as `c_library`.
    """
    files = {name: _identified(name)[2] for name in names}
    missing = [name for name in names if not any((folder / files[name]).is_file() for folder in cache_folders(None))]
    if missing:
        with _first_to_build(), ThreadPoolExecutor(len(missing)) as pool:
            for _ in pool.map(c_library, missing):
                pass


def _identified(name: str) -> tuple[list[str], Path, str]:
    """How a library is compiled, from what, and the name of its entry."""
    source, command = Path(__file__).with_name(f"{name}.c"), _command()
    sources = [path.read_text(encoding="ascii") for path in (source, *sorted(source.parent.glob("*.h")))]
    identity = (*sources, *command, _version(command[0]), _processor())
    return command, source, f"{name}-{hashlib.sha256(repr(identity).encode()).hexdigest()[:32]}.so"


@contextlib.contextmanager
def _first_to_build() -> Iterator[None]:
    """One process of this user at a time; all at once where folders cannot be locked."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            folder = cache_folders(None)[0]
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            descriptor = os.open(folder, os.O_RDONLY)
            stack.callback(os.close, descriptor)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield


def _command() -> list[str]:
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        raise CompilerError(f"there is no C compiler ({', '.join(COMPILERS)})")
    # Another compiler's threads would be a second set beside those of torch.
    has_torchs_threads = platform.system() == "Linux" and Path(compiler).name == "gcc"
    native = "-mcpu=native" if platform.machine() in ("arm64", "aarch64") else "-march=native"
    threads = "-fopenmp" if has_torchs_threads else "-fopenmp-simd"
    return [compiler, "-O3", native, *VECTORS, threads, "-shared", "-fPIC"]


@cache
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
