"""Checkpoints that several tests open."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.inference.example import recipe, write_checkpoint


@pytest.fixture(scope="session")
def mixtral(fresh_pool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of a small Mixtral in float32."""
    run_dir = tmp_path_factory.mktemp("mixtral") / "run"
    fresh_pool.run(1, write_checkpoint, recipe("mixtral", run_dir))
    return run_dir


@pytest.fixture(scope="session")
def qwen3(fresh_pool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of a small Qwen3-MoE in float32, whose first layer is dense."""
    run_dir = tmp_path_factory.mktemp("qwen3") / "run"
    fresh_pool.run(1, write_checkpoint, recipe("qwen3-moe", run_dir))
    return run_dir


@pytest.fixture(scope="module")
def single_rank() -> Iterator[None]:
    """A process group of only this process."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
