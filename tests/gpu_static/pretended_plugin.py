"""Plugin of pytest that runs GPU tests on the pretended device: `-p tests.gpu_static.pretended_plugin -m gpu`.

Tests of one process that need no allocator, no capture and no speed of a GPU. The patches come before the tests are
imported, whose marks ask for the device.
"""

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.gpu_static.pretended_cuda import modes, patches

PATCHES = ExitStack()


def pytest_configure() -> None:
    """Pretend that there is a device, before the first test is imported."""
    PATCHES.enter_context(patches())


def pytest_unconfigure() -> None:
    """Undo it."""
    PATCHES.close()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup() -> Iterator[None]:
    """Make fixtures on the device."""
    with modes():
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Iterator[None]:
    """Run a test on the device."""
    with modes():
        return (yield)
