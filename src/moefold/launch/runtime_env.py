"""What a rank sets for itself before it computes, and what its environment sets: threads, cores, memory, NCCL.

What the C library does with the memory of freed tensors on a CPU: kept for the next step, or given back.

List the communication backends that this build of torch has.
"""

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
"""Beginnings of the names of variables that change how ranks of a device compute and talk."""


def choose_threads(rank_env: RankEnv, device_type: str, environment: Mapping[str, str] = os.environ) -> None:
    """Give this rank its share of the cores, unless the user or a launcher has chosen.

    Ranks that share cores and spin on each other's threads are many times slower than one thread each.
    """
    if rank_env.world_size > 1 and OMP_THREADS_VARIABLE not in environment:
        torch.set_num_threads(
            threads_per_rank(_usable_cores(), os.cpu_count() or 1, rank_env.local_world_size, device_type)
        )


def threads_per_rank(cores: int, all_cores: int, local_ranks: int, device_type: str) -> int:
    """Threads of one rank.

    Args:
        cores: that this rank may run on. Those near a GPU are one of several parts of the machine.
        all_cores: of the machine.
        local_ranks: ranks of the machine.
        device_type: "cpu" or "cuda".
    """
    return max(1, min(cores, (all_cores if device_type == "cuda" else cores) // local_ranks))


def runtime_env_message(rank_env: RankEnv, device_type: str, environment: Mapping[str, str] = os.environ) -> str:
    """Return what is set, in one line, for the log of the first rank; empty for a rank by itself."""
    if rank_env.world_size == 1:
        return ""
    threads, who = torch.get_num_threads(), environment.get(OMP_THREADS_VARIABLE)
    found = [
        f"{name}={value}"
        for name, value in sorted(environment.items())
        if name.startswith(LOGGED_PREFIXES[device_type])
    ]
    parts = [
        f"{rank_env.local_world_size} of {rank_env.world_size} ranks on this machine",
        f"{threads} thread{'s' * (threads > 1)} each on {_usable_cores()} of {os.cpu_count()} cores",
        f"{OMP_THREADS_VARIABLE}={who}" if who else f"{OMP_THREADS_VARIABLE} not set",
        *found,
    ]
    return ", ".join(parts)


def _usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def available_backends() -> list[str]:
    """Return the names of the usable backends of torch.distributed; empty if torch was built without it."""
    if not dist.is_available():
        return []
    checks = {"gloo": dist.is_gloo_available, "nccl": dist.is_nccl_available}
    return [name for name, is_available in checks.items() if is_available()]
