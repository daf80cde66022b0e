"""Peak dense bfloat16 throughput of devices by their names, for the MFU of a run."""

import re
import tomllib
from functools import lru_cache
from importlib.resources import files

_PARTIAL_DEVICE = re.compile(r"\b(mig|grid|vgpu|laptop)\b")
"""Names of partial or reduced devices, whose peak is not the device's."""


@lru_cache(maxsize=1)
def _peaks() -> dict[str, float]:
    """Return TFLOP/s without sparsity by pattern, in the order of the file."""
    return tomllib.loads((files("moefold.cost") / "device_peaks.toml").read_text(encoding="utf-8"))


def peak_bf16_tflops(device_name: str) -> float | None:
    """Return the peak dense bfloat16 TFLOP/s of a device, or None if it is unknown.

    A slice of a device (MIG, vGPU) and a laptop's variant are unknown.

    Args:
        device_name: name as returned by `torch.cuda.get_device_name` ("NVIDIA H100 80GB HBM3").
    """
    name = device_name.lower().replace("-", " ").replace("_", " ")
    if _PARTIAL_DEVICE.search(name):
        return None
    return next((peak for pattern, peak in _peaks().items() if re.search(rf"\b({pattern})\b", name)), None)
