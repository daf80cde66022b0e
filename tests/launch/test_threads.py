"""Threads of a rank, and the line that names the settings."""

from dataclasses import replace

import pytest
import torch

from moefold.host.rank_env import RankEnv
from moefold.launch.threads_and_malloc import choose_threads, runtime_env_message, threads_per_rank

PLACE = RankEnv(0, 0, 16, "10.0.0.1", 1, local_world_size=8)
ALONE = RankEnv(0, 0, 1, "127.0.0.1", 1)
TOLD = {"MALLOC_TRIM_THRESHOLD_": "131072"}


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("cores", "all_cores", "ranks", "device", "expected"),
    [
        (64, 64, 8, "cpu", 8),
        (2, 2, 8, "cpu", 1),
        # A container, or a job, that has some of the cores.
        (16, 64, 8, "cpu", 2),
        # Bound to the half of the machine that is near the GPU, with three others.
        (32, 64, 8, "cuda", 8),
        (4, 64, 8, "cuda", 4),
    ],
)
def test_ranks_share_the_cores(cores, all_cores, ranks, device, expected):
    assert threads_per_rank(cores, all_cores, ranks, device) == expected


def test_a_number_that_was_chosen_stays(threads):
    torch.set_num_threads(3)
    choose_threads(PLACE, "cpu", {"OMP_NUM_THREADS": "3"})
    choose_threads(ALONE, "cpu", {})
    assert torch.get_num_threads() == 3


def test_the_line_names_the_settings_of_the_environment(threads):
    torch.set_num_threads(1)
    environment = {"NCCL_DEBUG": "INFO", "GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"}
    line = runtime_env_message(PLACE, "cuda", environment)
    assert line.startswith("8 of 16 ranks on this machine, 1 thread each on ")
    assert line.endswith(" cores, OMP_NUM_THREADS=1, NCCL_DEBUG=INFO")
    assert runtime_env_message(PLACE, "cpu", environment | TOLD).endswith(
        "OMP_NUM_THREADS=1, GLOO_SOCKET_IFNAME=eth0, MALLOC_TRIM_THRESHOLD_=131072"
    )
    assert runtime_env_message(PLACE, "cpu", TOLD).endswith("OMP_NUM_THREADS not set, MALLOC_TRIM_THRESHOLD_=131072")
    one_machine = replace(PLACE, local_world_size=16)
    assert runtime_env_message(one_machine, "cuda", environment)
    assert runtime_env_message(one_machine, "cpu", environment) == "", "`moefold doctor` says it"
    assert runtime_env_message(ALONE, "cpu", environment | TOLD) == ""
