"""Triton's kernels run on the GPU if there is one, else in its interpreter (tests/conftest.py)."""

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

collect_ignore_glob = [] if find_spec("triton") else ["test_*.py"]


def pytest_report_header():
    """Say that nothing can be tested where Triton is missing."""
    return "Triton's kernels are not tested: the package triton is not installed" if collect_ignore_glob else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Let `make gpu` run the tests of Triton's kernels too."""
    if not torch.cuda.is_available():
        return
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.gpu)
