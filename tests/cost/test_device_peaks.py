"""The peak rate of a device is found by the name that its driver prints."""

import pytest

from moefold.cost.device_peaks import peak_bf16_tflops


@pytest.mark.parametrize(
    ("device_name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989.5),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA H100 NVL", 835.5),
        ("NVIDIA H800", 989.5),
        ("NVIDIA H200", 989.5),
        ("NVIDIA H200 NVL", 835.5),
        ("NVIDIA H20", 148.0),
        ("NVIDIA GH200 480GB", 989.5),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA A100-PCIE-40GB", 312.0),
        ("NVIDIA A800-SXM4-80GB", 312.0),
        ("NVIDIA A30", 165.0),
        ("NVIDIA A40", 149.7),
        ("NVIDIA B200", 2250.0),
        ("NVIDIA GB200", 2500.0),
        ("NVIDIA B300 SXM6 AC", 2250.0),
        ("NVIDIA GB300", 2500.0),
        ("NVIDIA L4", 121.0),
        ("NVIDIA L40", 181.05),
        ("NVIDIA L40S", 362.05),
        ("NVIDIA RTX A6000", 154.8),
        ("NVIDIA GeForce RTX 3090", 71.0),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("NVIDIA GeForce RTX 5090", 209.5),
        ("AMD Instinct MI300A", 980.6),
        ("AMD Instinct MI300X", 1307.4),
        ("AMD Instinct MI325X", 1307.4),
        ("AMD Instinct MI350X", 2306.9),
        ("AMD Instinct MI355X", 2516.6),
        ("amd instinct mi300x oam", 1307.4),
    ],
)
def test_known_devices(device_name: str, peak: float) -> None:
    assert peak_bf16_tflops(device_name) == peak


@pytest.mark.parametrize(
    "device_name",
    [
        "",
        "cpu",
        "AMD EPYC 9654 96-Core Processor",
        "Tesla V100-SXM2-16GB",
        "NVIDIA GeForce RTX 3090 Ti",
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
        "GRID A100-4C",
        "NVIDIA L400",
    ],
)
def test_unknown_and_partial_devices_have_no_peak(device_name: str) -> None:
    assert peak_bf16_tflops(device_name) is None
