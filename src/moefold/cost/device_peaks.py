"""Peak dense bfloat16 throughput of devices by their names, for the MFU of a run."""

import re

_PARTIAL_DEVICE = re.compile(r"\b(mig|grid|vgpu|laptop)\b")
"""Names of partial or reduced devices, whose peak is not the device's."""

# Since Hopper, NVIDIA documents print peaks with 2:4 sparsity. Here is the dense half. Sources are the datasheets of
# the devices, except where another document is named.
_PEAKS: tuple[tuple[str, float], ...] = (
    (r"gb[23]00", 2500.0),  # NVL72: 360 PFLOP/s sparse for 72 GPUs
    (r"b[23]00", 2250.0),  # HGX: 36 PFLOP/s sparse for 8 GPUs
    (r"h[12]00 nvl", 835.5),  # 1671 sparse
    (r"h[18]00 pcie", 756.0),  # 1513 sparse
    (r"g?h200|h[18]00", 989.5),  # SXM: 1979 sparse
    (r"h20", 148.0),
    (r"a[18]00", 312.0),  # SXM and PCIe
    (r"a30", 165.0),
    (r"a40", 149.7),
    (r"l40s", 362.05),
    (r"l40", 181.05),
    (r"l4", 121.0),  # 242 sparse
    (r"rtx a6000", 154.8),  # GA102 whitepaper, with float32 accumulation; also the 3090
    (r"rtx 3090$", 71.0),
    (r"rtx 4090$", 165.2),  # Ada whitepaper
    (r"rtx 5090$", 209.5),  # RTX Blackwell whitepaper
    (r"mi300a", 980.6),
    (r"mi3(00|25)x", 1307.4),
    (r"mi350x", 2306.9),
    (r"mi355x", 2516.6),
)
"""Patterns of device names, and TFLOP/s without sparsity. The first match counts."""


def peak_bf16_tflops(device_name: str) -> float | None:
    """Return the peak dense bfloat16 TFLOP/s of a device, or None if it is unknown.

    A slice of a device (MIG, vGPU) and a laptop's variant are unknown.

    Args:
        device_name: name as returned by `torch.cuda.get_device_name` ("NVIDIA H100 80GB HBM3").
    """
    name = device_name.lower().replace("-", " ").replace("_", " ")
    if _PARTIAL_DEVICE.search(name):
        return None
    return next((peak for pattern, peak in _PEAKS if re.search(rf"\b({pattern})\b", name)), None)
