"""Sizes of the pages of the KV cache, which the engine (`inference/engine/pages.py`) and its kernels share."""

PAGE_POSITIONS = 64
"""Positions of a page on a CPU: `KEYS` of the C kernels."""
CUDA_PAGE_POSITIONS = 256
"""The same on CUDA: torch's flash attention reads pages whose size is a multiple of this."""


def page_positions(device_type: str) -> int:
    """Return the positions of a page on a type of device."""
    return CUDA_PAGE_POSITIONS if device_type == "cuda" else PAGE_POSITIONS
