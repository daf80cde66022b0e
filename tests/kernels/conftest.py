"""Triton's kernels run on the GPU if there is one, else in its interpreter (tests/conftest.py); C on the CPU."""

import platform
import shutil
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from moefold.kernels import c_library

collect_ignore_glob = [] if find_spec("triton") else ["test_[!c]*.py", "test_compile.py"]


def pytest_report_header():
    """Say it where nothing can be tested."""
    return "Triton's kernels are not tested: the package triton is not here" if collect_ignore_glob else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """`make gpu` runs Triton's tests too."""
    for item in items:
        path = Path(item.fspath)
        is_tritons = path.parent == Path(__file__).parent and not path.name.startswith("test_c_")
        if torch.cuda.is_available() and is_tritons:
            item.add_marker(pytest.mark.gpu)


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A machine without a C compiler, on which no library was loaded before."""
    monkeypatch.setattr(shutil, "which", lambda name: None)
    c_library.load_library.cache_clear()
    yield
    c_library.load_library.cache_clear()


@pytest.fixture(scope="module")
def built_with(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """Builds a kernel whose compiler is told more flags; skips where they are another processor's."""

    def build(kernel: Callable[[], Any], flags: tuple[str, ...]) -> Any:
        if flags and platform.machine() != "x86_64":
            pytest.skip("flags of another processor")
        command, folder = [*c_library._compile_command(), *flags], tmp_path_factory.mktemp("library")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(c_library, "_compile_command", lambda: command)
            patch.setattr(c_library, "cache_folders", lambda named: (folder,))
            c_library.load_library.cache_clear()
            built = kernel()
        c_library.load_library.cache_clear()
        return built

    return build
