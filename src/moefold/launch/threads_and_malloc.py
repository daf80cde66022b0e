"""Runtime environment of a rank: CPU threads, glibc malloc settings, logged variables and available backends.

Functions that need torch import it themselves: the settings of malloc do not need it.
"""

import ctypes
import os
import sys
from collections.abc import Mapping, MutableMapping

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

ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Environment variables that configure torch's CUDA allocator, which reads them at its first use."""


def expand_segments(environment: MutableMapping[str, str] = os.environ) -> None:
    """Make torch's CUDA allocator use expandable segments, unless the user configured it. Call it before CUDA starts.

    The routed tokens of a rank and the sizes of its blocks change with each step. Without expandable segments,
    free blocks of earlier sizes stay reserved: an allocation can fail although enough memory is free. Child processes
    inherit the setting.
    """
    if not any(name in environment for name in ALLOCATOR_VARIABLES):
        environment[ALLOCATOR_VARIABLES[0]] = "expandable_segments:True"


def choose_threads(rank_env: RankEnv, device_type: str, environment: Mapping[str, str] = os.environ) -> None:
    """Set torch's thread count to this rank's share of the cores, unless OMP_NUM_THREADS is set.

    Oversubscribed ranks, whose threads spin on the same cores, are many times slower than single-threaded ranks.
    """
    import torch

    if rank_env.world_size > 1 and OMP_THREADS_VARIABLE not in environment:
        cores = _usable_cores()
        torch.set_num_threads(threads_per_rank(cores, os.cpu_count() or 1, rank_env.local_world_size, device_type))


def threads_per_rank(cores: int, all_cores: int, local_ranks: int, device_type: str) -> int:
    """Return the number of CPU threads of one rank.

    Args:
        cores: cores that this rank may run on, for a GPU rank possibly only the cores of its NUMA node.
        all_cores: cores of the machine.
        local_ranks: ranks of the machine.
    """
    return max(1, min(cores, (all_cores if device_type == "cuda" else cores) // local_ranks))


def runtime_env_message(rank_env: RankEnv, device_type: str, environment: Mapping[str, str] = os.environ) -> str:
    """Return ranks, threads and logged variables in one line for the log of rank 0.

    Returns "" for ranks on the CPU of one machine, where `moefold doctor` reports the same, and for a single rank.
    """
    if rank_env.world_size == 1 or (device_type == "cpu" and rank_env.local_world_size == rank_env.world_size):
        return ""
    import torch

    threads = torch.get_num_threads()
    omp_threads = environment.get(OMP_THREADS_VARIABLE)
    variables = [
        f"{name}={value}"
        for name, value in sorted(environment.items())
        if name.startswith(LOGGED_PREFIXES[device_type])
    ]
    facts = [
        f"{rank_env.local_world_size} of {rank_env.world_size} ranks on this machine",
        f"{threads} thread{'s' * (threads > 1)} each on {_usable_cores()} of {os.cpu_count()} cores",
        f"{OMP_THREADS_VARIABLE}={omp_threads}" if omp_threads else f"{OMP_THREADS_VARIABLE} not set",
        *variables,
    ]
    return ", ".join(facts)


def _usable_cores() -> int:
    """Return the number of cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def available_backends() -> list[str]:
    """Return the names of the available torch.distributed backends, or empty if torch was built without it."""
    import torch.distributed as dist

    if not dist.is_available():
        return []
    checks = {"gloo": dist.is_gloo_available, "nccl": dist.is_nccl_available}
    return [name for name, is_available in checks.items() if is_available()]


M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
"""Parameter of mallopt, from glibc's malloc.h, like `M_TRIM_THRESHOLD`."""
TRIM_DISABLED = -1
DEFAULT_TRIM_BYTES = 1 << 17
TUNABLES_VARIABLE = "GLIBC_TUNABLES"
PRELOAD_VARIABLE = "LD_PRELOAD"
MMAP_THRESHOLD_BYTES = 1 << 20
MAX_MMAP_THRESHOLD_BYTES = (1 << 30, 1 << 25)
"""Candidates for M_MMAP_THRESHOLD, in order: older glibc versions, such as 2.31, accept at most the second."""

MALLOC_VARIABLES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_")
"""Environment variables that configure glibc's malloc."""


def keeps_freed_blocks(device_type: str, environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether `keep_freed_blocks` has an effect: on a CPU with glibc's malloc, not configured by the user."""
    is_configured = any(name in environment for name in MALLOC_VARIABLES) or "glibc.malloc" in environment.get(
        TUNABLES_VARIABLE, ""
    )
    # The library names of jemalloc, tcmalloc and mimalloc all contain "malloc".
    is_replaced = "malloc" in environment.get(PRELOAD_VARIABLE, "")
    return device_type == "cpu" and not (is_configured or is_replaced) and _mallopt() is not None


def malloc_message(device_type: str, environment: Mapping[str, str] = os.environ) -> str:
    """Return the malloc setting as text for the log, or "" if `keep_freed_blocks` has no effect."""
    return "freed memory is kept" if keeps_freed_blocks(device_type, environment) else ""


def keep_freed_blocks(device_type: str, environment: Mapping[str, str] = os.environ) -> None:
    """Make glibc's malloc keep freed blocks below 1 GiB (32 MiB in older versions) instead of returning them.

    A step frees its activations and gradients, and the next step allocates the same sizes. By default glibc returns the
    top of its heap, and each block of 32 MiB or more, to the system, which zeroes every page again. That is up to a
    quarter of a large layer's step (docs/log.md#2026-11-23-freed-memory-is-kept-small-operands-are-read-in-place). In
    exchange the process stays at its peak size, with fragmentation. Affects the whole process, and glibc only.
    """
    mallopt = _mallopt() if keeps_freed_blocks(device_type, environment) else None
    # A rejected size changes nothing. An accepted one also disables glibc's dynamic threshold, so it is set first.
    if mallopt is not None and any(mallopt(M_MMAP_THRESHOLD, size) for size in MAX_MMAP_THRESHOLD_BYTES):
        mallopt(M_TRIM_THRESHOLD, TRIM_DISABLED)


def return_large_blocks() -> None:
    """Make glibc's malloc mmap each block of 1 MiB or more, unmap it when freed, and trim its heap.

    By default glibc raises this threshold to the largest freed block, up to 32 MiB. The buffers of a conversion then
    fragment the heap, which grew by a tenth of the model (docs/log.md#2026-11-20-memory-of-conversions). Affects the
    whole process. Other C libraries are left unchanged.
    """
    mallopt = _mallopt()
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, MMAP_THRESHOLD_BYTES)
        mallopt(M_TRIM_THRESHOLD, DEFAULT_TRIM_BYTES)


def _mallopt() -> "ctypes._NamedFuncPointer | None":
    return getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
