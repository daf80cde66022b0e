"""Peak dense bfloat16 throughput of devices by their names, for the MFU of a run."""

import re

from moefold.package_table import package_table

_PARTIAL_DEVICE = re.compile(r"\b(mig|grid|vgpu|laptop)\b")
"""Names of partial or reduced devices, whose peak is not the device's."""


def peak_bf16_tflops(device_name: str) -> float | None:
    """Return the peak dense bfloat16 TFLOP/s of a device, or None if it is unknown.

    A slice of a device (MIG, vGPU) and a laptop's variant are unknown.

    Args:
        device_name: name as returned by `torch.cuda.get_device_name` ("NVIDIA H100 80GB HBM3").
    """
    name = device_name.lower().replace("-", " ").replace("_", " ")
    if _PARTIAL_DEVICE.search(name):
        return None
    # TFLOP/s without sparsity by pattern. The first match counts.
    peaks = package_table("cost/device_peaks.toml")
    return next((peak for pattern, peak in peaks.items() if re.search(rf"\b({pattern})\b", name)), None)
