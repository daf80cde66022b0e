"""Peak dense bfloat16 throughput of devices by their names, for the MFU of a run."""

import re

_PARTIAL_DEVICE = re.compile(r"\b(mig|grid|vgpu|laptop)\b")
"""Names of partial or reduced devices, whose peak is not the device's."""

_PEAKS: tuple[tuple[str, float], ...] = (
    (r"gb300", 2500.0),
    (r"gb200", 2500.0),
    (r"b300", 2250.0),
    (r"b200", 2250.0),
    (r"gh200", 989.5),
    (r"h200 nvl", 835.5),
    (r"h200", 989.5),
    (r"h100 nvl", 835.5),
    (r"h[18]00 pcie", 756.0),
    (r"h[18]00", 989.5),
    (r"h20", 148.0),
    (r"a[18]00", 312.0),
    (r"a30", 165.0),
    (r"a40", 149.7),
    (r"l40s", 362.05),
    (r"l40", 181.05),
    (r"l4", 121.0),
    (r"rtx a6000", 154.8),
    (r"rtx 3090$", 71.0),
    (r"rtx 4090$", 165.2),
    (r"rtx 5090$", 209.5),
    (r"mi300a", 980.6),
    (r"mi300x", 1307.4),
    (r"mi325x", 1307.4),
    (r"mi350x", 2306.9),
    (r"mi355x", 2516.6),
)


def peak_bf16_tflops(device_name: str) -> float | None:
    """Return the peak dense bfloat16 TFLOP/s of a device, or None if it is unknown.

    Since Hopper, NVIDIA documents print peaks with 2:4 sparsity; here is the dense half. Sources, all vendor
    documents of the device:

    * GB300, GB200: GB300 NVL72 and GB200 NVL72 datasheets, 360 PFLOP/s sparse for 72 GPUs: 2500.
    * B300, B200: HGX B300 and HGX B200 datasheets, 36 PFLOP/s sparse for 8 GPUs: 2250.
    * GH200, H200 (SXM), H100 (SXM), H800 (SXM): datasheets, 1979 sparse: 989.5; H200 NVL and H100 NVL: 1671 sparse:
      835.5; H100 PCIe and H800 PCIe: 1513 sparse: 756. H20: datasheet, 148 dense.
    * A100 and A800, SXM and PCIe: datasheets, 312 dense. A30: 165. A40: 149.7.
    * L40S: datasheet, 362.05 dense. L40: 181.05. L4: 242 sparse: 121.
    * RTX A6000: GA102 whitepaper, 154.8 (float32 accumulation). RTX 3090: the same, 71. RTX 4090: Ada whitepaper,
      165.2. RTX 5090: RTX Blackwell whitepaper, 209.5.
    * MI300A, MI300X, MI325X, MI350X, MI355X: AMD datasheets, 980.6, 1307.4, 1307.4, 2306.9, 2516.6 dense.

    A slice of a device (MIG, vGPU) and a laptop's variant are unknown.

    Args:
        device_name: name as returned by `torch.cuda.get_device_name` ("NVIDIA H100 80GB HBM3").
    """
    name = device_name.lower().replace("-", " ").replace("_", " ")
    if _PARTIAL_DEVICE.search(name):
        return None
    return next((peak for pattern, peak in _PEAKS if re.search(rf"\b{pattern}\b", name)), None)
