"""Checkpoints that several tests open."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.inference.example import recipe, recipe_of_kind, write_checkpoint


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


@pytest.fixture(scope="session")
def of_kind(fresh_pool, mixtral, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Returns the run folder of a small model of a kind, in float64 except "mixtral". Each is written once."""
    made = {"mixtral": mixtral}

    def folder(kind: str) -> Path:
        if kind not in made:
            made[kind] = tmp_path_factory.mktemp(kind) / "run"
            fresh_pool.run(1, write_checkpoint, recipe_of_kind(kind, made[kind]))
        return made[kind]

    return folder


@pytest.fixture(scope="module")
def single_rank() -> Iterator[None]:
    """A process group of only this process."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
