"""Peak resident memory of this process, or of the GPU."""

import resource
import sys
from pathlib import Path

GIB = 2**30

_PROCESS_STATUS = Path("/proc/self/status")


def peak_memory_gib(device_type: str) -> float:
    """Return the peak memory of this process in GiB, since it started.

    On `cuda` this is the peak of allocated tensor bytes on the current device (`torch.cuda.max_memory_allocated`),
    which the recipe's sizes determine. The caching allocator's unused blocks, the CUDA context and NCCL's buffers come
    on top, so leave headroom above it.

    On `cpu` it is the peak resident set of the process, code and libraries included (about 0.3 GiB for torch), as torch
    has no CPU tensor statistics. On Linux it is VmHWM of /proc; elsewhere `getrusage`, which is second choice because a
    child process inherits its parent's peak.

    Args:
        device_type: "cuda" or "cpu".
    """
    if device_type == "cuda":
        import torch

        return float(torch.cuda.max_memory_allocated()) / GIB
    if _PROCESS_STATUS.exists():
        for line in _PROCESS_STATUS.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024 / GIB
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    peak_bytes = peak if sys.platform == "darwin" else peak * 1024
    return peak_bytes / GIB
