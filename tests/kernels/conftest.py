"""Kernels run on the GPU if there is one, else in Triton's interpreter (tests/conftest.py)."""

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

collect_ignore_glob = [] if find_spec("triton") else ["test_*.py"]


def pytest_report_header():
    """Say it where nothing can be tested."""
    return "kernels are not tested: the package triton is not here" if collect_ignore_glob else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """`make gpu` runs these tests too."""
    for item in items:
        if torch.cuda.is_available() and Path(item.fspath).parent == Path(__file__).parent:
            item.add_marker(pytest.mark.gpu)
