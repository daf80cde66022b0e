"""What a rank sets for itself before it computes, and what its environment sets: threads, cores, memory, NCCL."""

import os
from collections.abc import Mapping

import torch

from moefold.launch.place import Place

THREADS = "OMP_NUM_THREADS"
NAMED = {
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


def choose_threads(place: Place, device_type: str, environment: Mapping[str, str] = os.environ) -> None:
    """Give this rank its share of the cores, unless the user or a launcher has chosen.

    Ranks that share cores and spin on each other's threads are many times slower than one thread each.
    """
    if place.world_size > 1 and THREADS not in environment:
        torch.set_num_threads(threads_of(_cores(), os.cpu_count() or 1, place.local_size, device_type))


def threads_of(cores: int, all_cores: int, local_ranks: int, device_type: str) -> int:
    """Threads of one rank.

    Args:
        cores: that this rank may run on. Those near a GPU are one of several parts of the machine.
        all_cores: of the machine.
        local_ranks: ranks of the machine.
        device_type: "cpu" or "cuda".
    """
    return max(1, min(cores, (all_cores if device_type == "cuda" else cores) // local_ranks))


def settings_note(place: Place, device_type: str, environment: Mapping[str, str] = os.environ) -> str:
    """Return what is set, in one line, for the log of the first rank; empty for a rank by itself."""
    if place.world_size == 1:
        return ""
    threads, who = torch.get_num_threads(), environment.get(THREADS)
    found = [f"{name}={value}" for name, value in sorted(environment.items()) if name.startswith(NAMED[device_type])]
    parts = [
        f"{place.local_size} of {place.world_size} ranks on this machine",
        f"{threads} thread{'s' * (threads > 1)} each on {_cores()} of {os.cpu_count()} cores",
        f"{THREADS}={who}" if who else f"{THREADS} not set",
        *found,
    ]
    return ", ".join(parts)


def _cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
