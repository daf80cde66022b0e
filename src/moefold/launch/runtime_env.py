"""Runtime environment of a rank: CPU threads, glibc malloc settings, logged variables and available backends."""

import os
from collections.abc import Mapping

import torch
import torch.distributed as dist

from moefold.host.rank_env import RankEnv

OMP_THREADS_VARIABLE = "OMP_NUM_THREADS"
LOGGED_PREFIXES = {
    "cpu": ("GLOO_", "MALLOC_", "GLIBC_TUNABLES"),
    "cuda": (
        "NCCL_",
        "CUDA_DEVICE_MAX_CONNECTIONS",
        "CUDA_VISIBLE_DEVICES",
        "PYTORCH_CUDA_ALLOC_CONF",
        "PYTORCH_ALLOC_",
    ),
}
"""Prefixes of environment variables that change computation or communication, by device type."""


def choose_threads(rank_env: RankEnv, device_type: str, environment: Mapping[str, str] = os.environ) -> None:
    """Set torch's thread count to this rank's share of the cores, unless OMP_NUM_THREADS is set.

    Oversubscribed ranks, whose threads spin on the same cores, are many times slower than single-threaded ones.
    """
    if rank_env.world_size > 1 and OMP_THREADS_VARIABLE not in environment:
        torch.set_num_threads(
            threads_per_rank(_usable_cores(), os.cpu_count() or 1, rank_env.local_world_size, device_type)
        )


def threads_per_rank(cores: int, all_cores: int, local_ranks: int, device_type: str) -> int:
    """Return the number of CPU threads of one rank.

    Args:
        cores: cores that this rank may run on; for a GPU rank possibly only those of its NUMA node.
        all_cores: cores of the machine.
        local_ranks: ranks of the machine.
        device_type: "cpu" or "cuda".
    """
    return max(1, min(cores, (all_cores if device_type == "cuda" else cores) // local_ranks))


def runtime_env_message(rank_env: RankEnv, device_type: str, environment: Mapping[str, str] = os.environ) -> str:
    """Return ranks, threads and logged variables in one line for the log of rank 0; "" for a single rank."""
    if rank_env.world_size == 1:
        return ""
    threads = torch.get_num_threads()
    omp_threads = environment.get(OMP_THREADS_VARIABLE)
    variables = [
        f"{name}={value}"
        for name, value in sorted(environment.items())
        if name.startswith(LOGGED_PREFIXES[device_type])
    ]
    parts = [
        f"{rank_env.local_world_size} of {rank_env.world_size} ranks on this machine",
        f"{threads} thread{'s' * (threads > 1)} each on {_usable_cores()} of {os.cpu_count()} cores",
        f"{OMP_THREADS_VARIABLE}={omp_threads}" if omp_threads else f"{OMP_THREADS_VARIABLE} not set",
        *variables,
    ]
    return ", ".join(parts)


def _usable_cores() -> int:
    """Return the number of cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def available_backends() -> list[str]:
    """Return the names of the available torch.distributed backends; empty if torch was built without it."""
    if not dist.is_available():
        return []
    checks = {"gloo": dist.is_gloo_available, "nccl": dist.is_nccl_available}
    return [name for name, is_available in checks.items() if is_available()]
