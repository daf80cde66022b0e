"""Ranks that read each other's experts are processes of one machine, on the CPU."""

import pytest

from moefold.config.sections.parallel import ParallelConfig
from moefold.config.sections.rl import RolloutConfig
from moefold.errors import ConfigError
from moefold.validate.rl import check_fetching_ranks


def check(device: str, per_host: int, first_rank: int = 0, experts: str = "fetch", **parallel: int) -> None:
    mapping = ParallelConfig(**parallel)
    check_fetching_ranks(mapping, RolloutConfig(experts=experts), device, per_host, first_rank=first_rank)


def test_a_device_without_shared_memory_is_refused():
    with pytest.raises(ConfigError, match=r"rollout.experts='fetch' .* not implemented for the device 'cuda'; choose"):
        check("cuda", 4, world_size=4, ep=4)


def test_ranks_of_two_machines_are_refused():
    check("cpu", 4, world_size=8, ep=4)
    check("cpu", 4, world_size=8, ep=2, pp=2)
    with pytest.raises(ConfigError, match=r"ranks 0, 1, 2, 3 share experts, with 2 ranks on a machine; choose"):
        check("cpu", 2, world_size=8, ep=4)
    check("cpu", 4, first_rank=2, world_size=2, ep=2)
    with pytest.raises(ConfigError, match=r"ranks 3, 4 share experts"):
        check("cpu", 4, first_rank=3, world_size=2, ep=2)
    check("cuda", 2, experts="exchange", world_size=8, ep=4)
