"""Roofline: peak GEMM and copy rates of the machine, measured in the same rounds as the benchmark."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from moefold.launch.malloc import malloc_message
from moefold.ops.gemm import TORCH_GEMM

GEMM_SIZE = {"cpu": 1024, "cuda": 8192}
COPY_BYTES = {"cpu": 1 << 27, "cuda": 1 << 30}
"""Size of the copy; larger than every cache."""
TORCH_MM = "GEMM, torch.mm"
ONEDNN = "GEMM, oneDNN"
COPY = "copy"


@dataclass(frozen=True)
class PeakRates:
    """Measured peak rates of the machine."""

    flops_per_s: float
    """FLOP/s of a large square GEMM, by the faster library."""
    bytes_per_s: float
    """Bytes/s, read and written, of a large copy."""

    def roofline_s(self, flops: float, moved_bytes: float) -> float:
        """Return the roofline time of an amount of FLOPs and bytes."""
        return max(flops / self.flops_per_s, moved_bytes / self.bytes_per_s)


def roofline_kernels(dtype: torch.dtype, device: torch.device) -> dict[str, Callable[[], object]]:
    """Return the GEMM and copy kernels for `peak_rates`, to be timed together with the implementations."""
    n = GEMM_SIZE[device.type]
    a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
    source = torch.zeros(COPY_BYTES[device.type], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    kernels: dict[str, Callable[[], object]] = {COPY: lambda: target.copy_(source)}
    has_onednn = TORCH_GEMM.is_faster_than_torch_mm(a)
    if not has_onednn or dtype == torch.float32:
        # Where bfloat16 is emulated, torch.mm would take seconds and is never the faster one.
        kernels[TORCH_MM] = lambda: torch.mm(a, b)
    if has_onednn:
        kernels[ONEDNN] = lambda: TORCH_GEMM.matmul(a, b)
    return kernels


def peak_rates(median_s: dict[str, float], device: torch.device) -> PeakRates:
    """Compute the peak rates from the median times of `roofline_kernels`."""
    flops = 2 * GEMM_SIZE[device.type] ** 3
    fastest = min(median_s[name] for name in (TORCH_MM, ONEDNN) if name in median_s)
    return PeakRates(flops / fastest, 2 * COPY_BYTES[device.type] / median_s[COPY])


def free_memory_bytes(device: torch.device) -> float:
    """Return the free memory of the device, in bytes."""
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[0])
    import os

    return float(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))


def describe_device(device: torch.device) -> str:
    """Return a description of the device."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    cpuinfo = Path("/proc/cpuinfo")
    lines = [line.partition(":") for line in cpuinfo.read_text().splitlines()] if cpuinfo.exists() else []
    facts = {name.strip(): value.strip() for name, _, value in lines}
    # On a virtual machine the model name is often only that of the vendor.
    numbers = [f"{key} {facts[name]}" for key, name in (("family", "cpu family"), ("model", "model")) if name in facts]
    family = f" ({', '.join(numbers)})" if numbers else ""
    parts = (
        f"{facts.get('model name', 'CPU')}{family}",
        f"{torch.get_num_threads()} threads",
        malloc_message(device.type),
    )
    return ", ".join(filter(None, parts))
