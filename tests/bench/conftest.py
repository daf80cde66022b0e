"""Fixtures of the bench's tests."""

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore


@pytest.fixture
def group_of_one():
    """A process group of this process, as `moefold bench` has it."""
    dist.init_process_group("fake", rank=0, world_size=1, store=FakeStore())
    yield
    dist.destroy_process_group()
