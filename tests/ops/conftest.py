"""Kernels in C on the CPU: machines without a compiler, and other compiler flags."""

import os
import platform
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from moefold.ops.cpu import build as c_library


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A machine without a C compiler and without a loaded library."""
    monkeypatch.setattr(shutil, "which", lambda name: None)
    c_library.load_library.cache_clear()
    yield
    c_library.load_library.cache_clear()


@pytest.fixture(scope="module")
def built_with(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """Builds a kernel whose compiler is told more flags. Skips where they are another processor's.

    Without flags it is the kernel of runs, whose library the cache has. Another library is compiled once for all files
    and workers of the session; its name is a hash of the flags too.
    """
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "libraries"

    def build(kernel: Callable[[], Any], flags: tuple[str, ...]) -> Any:
        if not flags:
            return kernel()
        if platform.machine() != "x86_64":
            pytest.skip("flags of another processor")
        command = [*c_library._compile_command(), *flags]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(c_library, "_compile_command", lambda: command)
            patch.setattr(c_library, "cache_folders", lambda named: (folder,))
            c_library.load_library.cache_clear()
            built = kernel()
        c_library.load_library.cache_clear()
        return built

    return build
