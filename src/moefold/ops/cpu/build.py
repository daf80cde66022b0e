"""Build and load the C sources of this folder as shared libraries, once on each machine.

A kernel of this folder (`CNorm` and the others) loads its library when it is made. As a compiler may be wrong, it then
compares the results of a small self-test with its reference. It raises `CompilerError` if it cannot be used.
"""

import contextlib
import ctypes
import errno
import hashlib
import os
import platform
import shutil
import stat
import subprocess
import tempfile
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from moefold.cache_dir import cache_folders
from moefold.file_lock import FileLock
from moefold.progress import WorkProgress

COMPILERS = ("gcc", "cc", "clang")
"""Compilers in order of preference. On Linux gcc uses the same thread library (libgomp) as torch."""
COMPILE_TIMEOUT_S = 600
"""Longest time of one compilation: seconds on a quiet machine, minutes where many jobs share a core."""
SILENCE_S = 3.0
"""Time until a compilation, or the wait for a compilation by another process, is reported."""
VECTORIZATION_FLAGS = ("-fno-trapping-math", "-fno-math-errno", "-ffinite-math-only", "-fno-signed-zeros")
"""Flags that let comparisons become min and max instructions: without them gcc 12 vectorises these with AVX-512 only,
and SwiGLU takes four to eight times as long with AVX2. The order of sums is kept. Sources must not use floating-point
NaN tests.
"""


class CompilerError(Exception):
    """A library could not be built or loaded. The message is the reason, in a few words."""


@cache
def load_library(name: str) -> ctypes.CDLL:
    """Load the library of `<name>.c` from this user's cache. Compile it first if needed, in a second or two.

    The file name of a library is a hash of its source and all headers, the compiler and the processor, whose
    instructions it uses. It is written under a temporary name and renamed. Folders and files that other users may write
    are skipped, because loading a library runs its code.

    Raises:
        CompilerError: there is no compiler, it fails, or the library cannot be loaded.
    """
    command, source, file_name = _build_spec(name)
    library = b""
    for folder in cache_folders(None):
        try:
            with _open_private_folder(folder) as descriptor:
                if not _has_private_file(descriptor, file_name):
                    library = library or _compile(command, source)
                    _write_atomically(descriptor, file_name, library)
                return _load(folder, descriptor, file_name)
        except OSError:
            # Not writable, not private, or on a file system mounted noexec.
            continue
    try:
        with (
            tempfile.TemporaryDirectory(prefix="moefold-") as folder_name,
            _open_private_folder(Path(folder_name)) as descriptor,
        ):
            _write_atomically(descriptor, file_name, library or _compile(command, source))
            return _load(Path(folder_name), descriptor, file_name)
    except OSError as error:
        raise CompilerError(f"the library built by {command[0]} cannot be loaded ({error})") from None


POINTER = ctypes.c_void_p
SIZE = ctypes.c_int64
NUMBER = ctypes.c_int
Fields = tuple[tuple[str, Any], ...]
"""Names and C types of the fields of a struct."""


def declare(function: Any, *arguments: Any, result: Any = None) -> Any:
    """Set the C types of the arguments and of the result of a function, and return it."""
    function.argtypes = arguments
    function.restype = result
    return function


def pointer_fields(*names: str) -> Fields:
    """Return fields of type `void *`."""
    return tuple((name, POINTER) for name in names)


def size_fields(*names: str) -> Fields:
    """Return fields of type `int64_t`."""
    return tuple((name, SIZE) for name in names)


def check_results(
    kernel: str, dtype: torch.dtype, actual: Sequence[Tensor], expected: Sequence[Tensor], tolerance: float
) -> None:
    """Compare the results of a self-test with the float64 results of a reference, to find miscompiled kernels.

    Raises:
        CompilerError: results differ.
    """
    for a, e in zip(actual, expected, strict=True):
        if not torch.allclose(a.double(), e, rtol=tolerance, atol=tolerance):
            raise CompilerError(f"the compiled {kernel} is wrong in {dtype}")


def address_of(x: Tensor | None) -> int | None:
    """Return the address of a tensor's first element. None: NULL."""
    return None if x is None else x.data_ptr()


def build_libraries(*names: str) -> None:
    """Build these libraries in parallel where no cache has them. The first process of a machine builds for all.

    Raises:
        CompilerError: see `load_library`.
    """
    missing = [name for name in names if not _is_cached(_build_spec(name)[2])]
    if missing:
        with WorkProgress("moefold", show_after_s=SILENCE_S) as progress:
            progress.report("waiting for another process of this machine that compiles the C kernels")
            with _build_lock(), ThreadPoolExecutor(len(missing)) as pool:
                progress.report(f"compiling C kernels for this processor, once: {', '.join(missing)}")
                for _ in pool.map(load_library, missing):
                    pass


@contextlib.contextmanager
def _open_private_folder(folder: Path) -> Iterator[int]:
    """Open a folder that only this user may write, created if missing. It yields its descriptor.

    Operations through the descriptor apply to the checked folder, even if its path is replaced meanwhile.

    Raises:
        OSError: it cannot be created or opened.
        PermissionError: it belongs to another user, or other users may write it.
    """
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if not _is_private(os.fstat(descriptor)):
            raise PermissionError(errno.EPERM, "other users may write it", str(folder))
        yield descriptor
    finally:
        os.close(descriptor)


def _is_private(status: os.stat_result) -> bool:
    """Return whether a file or folder belongs to this user, and no other user may write it."""
    return status.st_uid == os.getuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _has_private_file(folder: int, file_name: str) -> bool:
    """Return whether an open folder has a regular file of this name that only this user may write."""
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
    """Write a library into an open folder under a temporary name, and rename it."""
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
    """Load a library of an open folder, through the descriptor where the system supports it (Linux)."""
    opened = Path("/proc/self/fd", str(descriptor))
    return ctypes.CDLL(str((opened if opened.exists() else folder) / file_name))


def _build_spec(name: str) -> tuple[list[str], Path, str]:
    """Return the compile command, the source, and the file name of the library."""
    source = Path(__file__).with_name(f"{name}.c")
    command = _compile_command()
    return command, source, _file_name(source, *command)


@cache
def _file_name(source: Path, *command: str) -> str:
    """Return the file name of a library, which has the hash of its source, all headers, the compiler and processor."""
    sources = [path.read_text(encoding="ascii") for path in (source, *sorted(source.parent.glob("*.h")))]
    identity = (*sources, *command, _compiler_version(command[0]), _cpu_identity())
    return f"{source.stem}-{hashlib.sha256(repr(identity).encode()).hexdigest()[:32]}.so"


@contextlib.contextmanager
def _build_lock() -> Iterator[None]:
    """Hold this user's build lock, or none where folders cannot be locked."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            descriptor = stack.enter_context(_open_private_folder(cache_folders(None)[0]))
            stack.enter_context(FileLock(os.dup(descriptor))).acquire()
        yield


def _compile_command() -> list[str]:
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        raise CompilerError(f"there is no C compiler ({', '.join(COMPILERS)})")
    # Another compiler's OpenMP library would start a second thread pool in addition to torch's.
    shares_torch_threads = platform.system() == "Linux" and Path(compiler).name == "gcc"
    native = "-mcpu=native" if platform.machine() in ("arm64", "aarch64") else "-march=native"
    threads = "-fopenmp" if shares_torch_threads else "-fopenmp-simd"
    return [compiler, "-O3", native, *VECTORIZATION_FLAGS, threads, "-shared", "-fPIC"]


@cache
def _compiler_version(compiler: str) -> str:
    return _run_compiler([compiler, "--version"])


def _cpu_identity() -> str:
    """Return a text that differs between processors of different instruction sets."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="ascii", errors="replace").splitlines() if cpuinfo.exists() else []
    features = [line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part"))]
    return "\n".join([platform.machine(), platform.processor(), *sorted(set(features))])


def _compile(command: list[str], source: Path) -> bytes:
    """Compile a source in a private temporary folder, and return the library."""
    with tempfile.TemporaryDirectory(prefix="moefold-") as folder:
        library = Path(folder, f"{source.stem}.so")
        _run_compiler([*command, str(source), "-o", str(library), "-lm"])
        return library.read_bytes()


def _run_compiler(command: list[str]) -> str:
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CompilerError(f"{command[0]} does not run ({error})") from None
    if result.returncode:
        stderr = result.stderr.strip().splitlines()
        raise CompilerError(f"{command[0]} fails: {stderr[0] if stderr else f'exit {result.returncode}'}")
    return result.stdout


class TensorView(ctypes.Structure):
    """C structs `heads_view` and `tokens_view`: address of [S, B, heads, D], strides of the first dims, and dtype.

    Strides are in elements. The last dim has stride 1.
    """

    _fields_ = (*pointer_fields("start"), *size_fields("token", "sample", "head", "is_bfloat16"))

    @classmethod
    def of(cls, x: Tensor) -> Self:
        """Return the view of a tensor of float32 or bfloat16, which must outlive it."""
        return cls(x.data_ptr(), *x.stride()[:3], x.dtype == torch.bfloat16)
