"""C sources of this package as libraries, built once on each machine by the compiler that it has."""

import contextlib
import ctypes
import errno
import fcntl
import hashlib
import os
import platform
import shutil
import stat
import subprocess
import tempfile
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

from moefold.cache_dir import cache_folders

COMPILERS = ("gcc", "cc", "clang")
"""In this order; gcc's threads are those that torch has on Linux."""
COMPILE_TIMEOUT_S = 60
VECTORIZATION_FLAGS = ("-fno-trapping-math", "-fno-math-errno", "-ffinite-math-only", "-fno-signed-zeros")
"""What lets comparisons become minima and maxima: without it gcc 12 makes vectors of them with AVX-512 alone, and the
gate takes four to eight times as long with AVX2. Sums keep their order, and sources may not ask whether a number is
one."""


class CompilerError(Exception):
    """There is no library, and this is why, in a few words."""


@cache
def load_library(name: str) -> ctypes.CDLL:
    """The library of `<name>.c` beside this file: found in the cache of this user, or compiled now, in a second or two.

    An entry is named by its source with all headers, its compiler and the processor, whose instructions it uses. It is
    written under another name and renamed whole. Folders and files that are not this user's alone are passed over: what
    is loaded runs.

    Raises:
        CompilerError: there is no compiler, it fails, or the library cannot be loaded.
    """
    command, source, file_name = _build_spec(name)
    built = b""
    for folder in cache_folders(None):
        try:
            with _open_private_folder(folder) as descriptor:
                if not _has_private_file(descriptor, file_name):
                    built = built or _compile(command, source)
                    _write_atomically(descriptor, file_name, built)
                return _load(folder, descriptor, file_name)
        except OSError:
            # Not to be written, not this user's alone, or of a file system from which nothing runs.
            continue
    try:
        with (
            tempfile.TemporaryDirectory(prefix="moefold-") as folder_name,
            _open_private_folder(Path(folder_name)) as descriptor,
        ):
            _write_atomically(descriptor, file_name, built or _compile(command, source))
            return _load(Path(folder_name), descriptor, file_name)
    except OSError as error:
        raise CompilerError(f"what {command[0]} built cannot be loaded ({error})") from None


def build_libraries(*names: str) -> None:
    """Have these libraries: what no cache has is compiled side by side, by the first process of a machine to ask.

    Raises:
        CompilerError: as `load_library`.
    """
    missing = [name for name in names if not _is_cached(_build_spec(name)[2])]
    if missing:
        with _build_lock(), ThreadPoolExecutor(len(missing)) as pool:
            for _ in pool.map(load_library, missing):
                pass


@contextlib.contextmanager
def _open_private_folder(folder: Path) -> Iterator[int]:
    """Open a folder that is this user's and that nobody else may write, made if it is missing; give its descriptor.

    What is done through the descriptor is done in the folder that was looked at, whatever its name stands for by then.

    Raises:
        OSError: it cannot be made or opened.
        PermissionError: it is another user's, or others may write it.
    """
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if not _is_private(os.fstat(descriptor)):
            raise PermissionError(errno.EPERM, "it is not this user's alone", str(folder))
        yield descriptor
    finally:
        os.close(descriptor)


def _is_private(status: os.stat_result) -> bool:
    """Return whether a file or folder is this user's, and nobody else may write it."""
    return status.st_uid == os.getuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _has_private_file(folder: int, file_name: str) -> bool:
    """Return whether an open folder has a plain file of this name that is this user's alone."""
    try:
        status = os.stat(file_name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return stat.S_ISREG(status.st_mode) and _is_private(status)


def _is_cached(file_name: str) -> bool:
    for folder in cache_folders(None):
        with contextlib.suppress(OSError), _open_private_folder(folder) as descriptor:
            if _has_private_file(descriptor, file_name):
                return True
    return False


def _write_atomically(folder: int, file_name: str, library: bytes) -> None:
    """Write a library into an open folder under another name, and rename it."""
    unfinished = f"{file_name}.{uuid.uuid4().hex}.tmp"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        with open(os.open(unfinished, flags, 0o600, dir_fd=folder), "wb") as file:
            file.write(library)
        os.rename(unfinished, file_name, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(unfinished, dir_fd=folder)
        raise


def _load(folder: Path, descriptor: int, file_name: str) -> ctypes.CDLL:
    """Load a library of an open folder: through the descriptor where the system has names for those (Linux)."""
    opened = Path("/proc/self/fd", str(descriptor))
    return ctypes.CDLL(str((opened if opened.exists() else folder) / file_name))


def _build_spec(name: str) -> tuple[list[str], Path, str]:
    """How a library is compiled, from what, and the name of its entry."""
    source = Path(__file__).with_name(f"{name}.c")
    command = _compile_command()
    sources = [path.read_text(encoding="ascii") for path in (source, *sorted(source.parent.glob("*.h")))]
    identity = (*sources, *command, _compiler_version(command[0]), _cpu_identity())
    return command, source, f"{name}-{hashlib.sha256(repr(identity).encode()).hexdigest()[:32]}.so"


@contextlib.contextmanager
def _build_lock() -> Iterator[None]:
    """One process of this user at a time; all at once where folders cannot be locked."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            descriptor = stack.enter_context(_open_private_folder(cache_folders(None)[0]))
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield


def _compile_command() -> list[str]:
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        raise CompilerError(f"there is no C compiler ({', '.join(COMPILERS)})")
    # Another compiler's threads would be a second set beside those of torch.
    has_torchs_threads = platform.system() == "Linux" and Path(compiler).name == "gcc"
    native = "-mcpu=native" if platform.machine() in ("arm64", "aarch64") else "-march=native"
    threads = "-fopenmp" if has_torchs_threads else "-fopenmp-simd"
    return [compiler, "-O3", native, *VECTORIZATION_FLAGS, threads, "-shared", "-fPIC"]


@cache
def _compiler_version(compiler: str) -> str:
    return _run_compiler([compiler, "--version"])


def _cpu_identity() -> str:
    """What tells processors with other instructions apart."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="ascii", errors="replace").splitlines() if cpuinfo.exists() else []
    named = [line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part"))]
    return "\n".join([platform.machine(), platform.processor(), *sorted(set(named))])


def _compile(command: list[str], source: Path) -> bytes:
    """Return the library that a compiler makes of a source, in a folder that nobody else can write."""
    with tempfile.TemporaryDirectory(prefix="moefold-") as folder:
        library = Path(folder, f"{source.stem}.so")
        _run_compiler([*command, str(source), "-o", str(library), "-lm"])
        return library.read_bytes()


def _run_compiler(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CompilerError(f"{command[0]} does not run ({error})") from None
    if done.returncode:
        said = done.stderr.strip().splitlines()
        raise CompilerError(f"{command[0]} fails: {said[0] if said else f'exit {done.returncode}'}")
    return done.stdout
