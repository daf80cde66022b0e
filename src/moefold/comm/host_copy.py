"""Copies between host and device that let the caller queue more work meanwhile."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

ALIGNMENT_BYTES = 16
"""Alignment of each array of a packed copy."""


class HostCopy:
    """Copy of a tensor to the host, in flight until `wait`.

    Copies from CUDA go through pinned memory, with an event: work that is queued between the constructor and `wait`
    runs while the host waits. A tensor on the CPU is not copied.

    Args:
        values: a small tensor without a gradient.
    """

    def __init__(self, values: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        self._values = values
        if values.is_cuda:
            self._values = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._values.copy_(values, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def wait(self) -> Tensor:
        """Wait for the copy, and return the tensor on the host."""
        if self._event is not None:
            self._event.synchronize()
        return self._values


def copy_to_device(values: Tensor, device: torch.device) -> Tensor:
    """Copy a host tensor to a device without a wait: to CUDA through pinned memory, which torch keeps until then."""
    host = values.pin_memory() if device.type == "cuda" else values
    return host.to(device, non_blocking=True)


def copy_together_to_device(arrays: Sequence[NDArray[np.generic]], device: torch.device) -> list[Tensor]:
    """Copy arrays of the host to a device without a wait, to CUDA by one copy. Arrays for the CPU are not copied."""
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    return unpack(copy_to_device(pack(arrays), device), arrays)


def pack(arrays: Sequence[NDArray[np.generic]]) -> Tensor:
    """Return the bytes of arrays, each at the next multiple of `ALIGNMENT_BYTES`, uint8."""
    padding = (bytes(-array.nbytes % ALIGNMENT_BYTES) for array in arrays)
    blocks = b"".join(block for array, pad in zip(arrays, padding, strict=True) for block in (array.tobytes(), pad))
    return torch.frombuffer(bytearray(blocks), dtype=torch.uint8)


def unpack(packed: Tensor, like: Sequence[NDArray[np.generic]]) -> list[Tensor]:
    """Return the arrays of `pack` as views of its bytes on any device. Only dtypes and shapes of `like` are read."""
    tensors = []
    start = 0
    for array in like:
        tensors.append(packed[start : start + array.nbytes].view(torch.from_numpy(array).dtype).view(array.shape))
        start += array.nbytes + -array.nbytes % ALIGNMENT_BYTES
    return tensors
