"""Kernels run on the GPU if there is one, else in Triton's interpreter, which has to be asked for before they exist."""

import os
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

pytest.importorskip("triton", reason="kernels need the package triton")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """`make gpu` runs these tests too."""
    for item in items:
        if torch.cuda.is_available() and Path(item.fspath).parent == Path(__file__).parent:
            item.add_marker(pytest.mark.gpu)
