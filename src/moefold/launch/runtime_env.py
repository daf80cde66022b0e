"""What a rank sets for itself before it computes, and what its environment sets: threads, cores, memory, NCCL.

What the C library does with the memory of freed tensors on a CPU: kept for the next step, or given back.

List the communication backends that this build of torch has.
"""

import ctypes
import os
import sys
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
    threads = torch.get_num_threads()
    who = environment.get(OMP_THREADS_VARIABLE)
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


M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
"""Of malloc.h of glibc."""
TRIM_DISABLED = -1
DEFAULT_TRIM_BYTES = 1 << 17
MMAP_THRESHOLD_BYTES = 1 << 20
MAX_MMAP_THRESHOLD_BYTES = (1 << 30, 1 << 25)
"""What is mapped by itself even where memory is kept; older versions, such as 2.31, take the second at most."""
MALLOC_VARIABLES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_")
"""Variables by which a user tells glibc the same."""
TUNABLES_VARIABLE = "GLIBC_TUNABLES"
PRELOAD_VARIABLE = "LD_PRELOAD"


def keeps_freed_blocks(device_type: str, environment: Mapping[str, str] = os.environ) -> bool:
    """Whether `keep_freed_blocks` does something: on a CPU, with glibc's malloc that no variable has told anything."""
    is_told = any(name in environment for name in MALLOC_VARIABLES) or "glibc.malloc" in environment.get(
        TUNABLES_VARIABLE, ""
    )
    # jemalloc, tcmalloc and mimalloc go by their names.
    is_replaced = "malloc" in environment.get(PRELOAD_VARIABLE, "")
    return device_type == "cpu" and not (is_told or is_replaced) and _mallopt() is not None


def malloc_message(device_type: str, environment: Mapping[str, str] = os.environ) -> str:
    """What is said of it, in a few words; empty where glibc is told nothing."""
    return "freed memory is kept" if keeps_freed_blocks(device_type, environment) else ""


def keep_freed_blocks(device_type: str, environment: Mapping[str, str] = os.environ) -> None:
    """Have glibc keep what is freed, but for blocks of a GiB or more (32 MiB in older versions).

    A step frees its activations and gradients, and the next one needs as much. glibc by default returns the end of its
    heap, and each block of 32 MiB or more, to the system, which then clears every page of them anew: up to a quarter of
    a step of a large layer (docs/log.md). The process has its peak for good instead, and gaps in it. For the whole
    process; other C libraries stay as they are.
    """
    mallopt = _mallopt() if keeps_freed_blocks(device_type, environment) else None
    # A size that is refused changes nothing. Any that is taken stops glibc from raising it by itself: this one first.
    if mallopt is not None and any(mallopt(M_MMAP_THRESHOLD, size) for size in MAX_MMAP_THRESHOLD_BYTES):
        mallopt(M_TRIM_THRESHOLD, TRIM_DISABLED)


def return_large_blocks() -> None:
    """Have glibc map each block of a MiB or more by itself, unmap it when it is freed, and trim its heap.

    It by default raises that size to the largest block that was freed, up to 32 MiB. The buffers of a conversion
    then lie in a heap whose gaps the next ones do not fit: it grew by a tenth of the model (docs/log.md). For the whole
    process; other C libraries stay as they are.
    """
    mallopt = _mallopt()
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, MMAP_THRESHOLD_BYTES)
        mallopt(M_TRIM_THRESHOLD, DEFAULT_TRIM_BYTES)


def _mallopt() -> "ctypes._NamedFuncPointer | None":
    return getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None


def available_backends() -> list[str]:
    """Return the names of the usable backends of torch.distributed; empty if torch was built without it."""
    if not dist.is_available():
        return []
    checks = {"gloo": dist.is_gloo_available, "nccl": dist.is_nccl_available}
    return [name for name, is_available in checks.items() if is_available()]
