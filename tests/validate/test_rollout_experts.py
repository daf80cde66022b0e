"""Ranks that read each other's experts are processes of one machine, on the CPU."""

from dataclasses import replace

import pytest

from moefold.config.parallel import ParallelConfig
from moefold.config.rl import RolloutConfig
from moefold.config.schema import Config
from moefold.errors import ConfigError
from moefold.validate.rollout_experts import check_fetching_ranks


def cfg(**parallel: int) -> Config:
    return replace(Config(), parallel=ParallelConfig(**parallel), rollout=RolloutConfig(experts="fetch"))


def test_a_device_without_shared_memory_is_refused():
    with pytest.raises(ConfigError, match=r"rollout.experts='fetch' .* not implemented for the device 'cuda'; choose"):
        check_fetching_ranks(cfg(world_size=4, ep=4), "cuda", 4)


def test_ranks_of_two_machines_are_refused():
    check_fetching_ranks(cfg(world_size=8, ep=4), "cpu", 4)
    check_fetching_ranks(cfg(world_size=8, ep=2, pp=2), "cpu", 4)
    with pytest.raises(ConfigError, match=r"ranks 0, 1, 2, 3 share experts, with 2 ranks on a machine; choose"):
        check_fetching_ranks(cfg(world_size=8, ep=4), "cpu", 2)
    check_fetching_ranks(cfg(world_size=2, ep=2), "cpu", 4, first_rank=2)
    with pytest.raises(ConfigError, match=r"ranks 3, 4 share experts"):
        check_fetching_ranks(cfg(world_size=2, ep=2), "cpu", 4, first_rank=3)
    check_fetching_ranks(replace(cfg(world_size=8, ep=4), rollout=RolloutConfig()), "cuda", 2)
