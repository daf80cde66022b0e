"""Fixtures shared by all tests."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    # Kernels run in Triton's interpreter, which has to be asked for before the first test imports one.
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(scope="session")
def pool() -> object:
    """Forks gloo ranks from a process that imported torch once, for all parity tests of the session."""
    from moefold.testing.pool import WorkerPool

    return WorkerPool()


@pytest.fixture(autouse=True)
def _same_random_numbers() -> None:
    """Each test draws the same numbers, whatever ran before it."""
    torch.manual_seed(0)
