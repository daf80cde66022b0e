"""Offload backends: the interface, host memory, the copy engine between device and host, and bandwidth measurement."""

import errno
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor


class OffloadBackend(Protocol):
    """Storage for offloaded bytes. `store` and `load` run on I/O threads, several at a time."""

    name: str
    """Name for messages."""

    @property
    def copy_engine(self) -> "CopyEngine":
        """Copies between the device and the host."""
        ...

    def store(self, data: Tensor, ready: Any) -> Any:
        """Store bytes.

        Args:
            data: uint8 [bytes] on the device.
            ready: result of `CopyEngine.record_event` when the data was computed.

        Returns:
            A handle for `load`, whose garbage collection frees the space. None if there is no space.

        Raises:
            OSError: the bytes cannot be stored.
        """
        ...

    def load(self, stored: Any, out: Tensor, ready: Any) -> Any:
        """Load bytes.

        Args:
            stored: the handle that `store` returned.
            out: uint8 [bytes] on the device, to be filled.
            ready: result of `CopyEngine.record_event` when `out` was allocated.

        Returns:
            An event for `CopyEngine.wait_event` before `out` is read.

        Raises:
            RunError: the bytes are lost, or differ from the stored bytes.
        """
        ...


class CopyEngine:
    """Copies between device and host memory, concurrently with the computation of the device.

    On CUDA each direction has its own stream. On the CPU both are the same memory, and there is nothing to wait for.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._is_cuda = device.type == "cuda"
        self._d2h_stream, self._h2d_stream = (torch.cuda.Stream(device) if self._is_cuda else None for _ in range(2))

    def init_thread(self) -> None:
        """Set the CUDA device of the current thread, as host memory is pinned for the thread's current device."""
        if self._is_cuda:
            torch.cuda.set_device(self.device)

    def record_event(self) -> Any:
        """Record an event on the current stream. Return None on the CPU."""
        return torch.cuda.current_stream(self.device).record_event() if self._is_cuda else None

    def host_allocation_bytes(self, num_bytes: int) -> int:
        """Return the bytes that the host allocator takes for `num_bytes`."""
        return pinned_allocation_bytes(num_bytes) if self._is_cuda else num_bytes

    def allocate_host(self, num_bytes: int) -> Tensor:
        """Allocate uint8 [bytes] of host memory, pinned on CUDA."""
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self._is_cuda)

    def allocate_device(self, num_bytes: int) -> Tensor:
        """Allocate uint8 [bytes] of device memory. Call it on the thread that uses the memory."""
        buffer = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
        if self._h2d_stream is not None:
            buffer.record_stream(self._h2d_stream)
        return buffer

    def to_host(self, data: Tensor, ready: Any, host: Tensor) -> Tensor:
        """Copy to `host`, blocking."""
        self.synchronize(self.to_host_async(data, ready, host))
        return host

    def to_host_async(self, data: Tensor, ready: Any, host: Tensor) -> Any:
        """Start a copy to `host`, and return an event for `synchronize`. Keep `data` alive until then."""
        if self._d2h_stream is None:
            host.copy_(data)
            return None
        with torch.cuda.stream(self._d2h_stream):
            self._d2h_stream.wait_event(ready)
            host.copy_(data, non_blocking=True)
            return self._d2h_stream.record_event()

    def synchronize(self, event: Any) -> None:
        """Block the host until an event is done."""
        if event is not None:
            event.synchronize()

    def to_device_async(self, host: Tensor, out: Tensor, ready: Any) -> Any:
        """Start a copy to `out`, and return an event for `wait_event`."""
        if self._h2d_stream is None:
            out.copy_(host)
            return None
        with torch.cuda.stream(self._h2d_stream):
            self._h2d_stream.wait_event(ready)
            out.copy_(host, non_blocking=True)
            return self._h2d_stream.record_event()

    def wait_event(self, event: Any) -> None:
        """Make the current stream wait for an event."""
        if event is not None:
            torch.cuda.current_stream(self.device).wait_event(event)


def pinned_allocation_bytes(num_bytes: int) -> int:
    """Return the size of torch's pinned allocation: a power of two (ATen/core/CachingHostAllocator.h, `allocate`)."""
    return 1 << (num_bytes - 1).bit_length()


@dataclass(frozen=True)
class _PinnedBuffer:
    """Bytes in host memory, which count as used until this object is garbage-collected."""

    host: Tensor
    allocated_bytes: int
    """Allocated size, rounded up by the allocator."""
    _freed: deque[int]

    def __del__(self) -> None:
        self._freed.append(self.allocated_bytes)


class HostMemory:
    """Host memory, pinned on CUDA, so that copies overlap with computation.

    Args:
        limit_bytes: maximum held at a time, with the allocator's rounding.
    """

    name = "host memory"

    def __init__(self, copy_engine: CopyEngine, limit_bytes: float = math.inf) -> None:
        self.copy_engine = copy_engine
        self._limit_bytes = limit_bytes
        self._used_bytes = 0
        self._freed: deque[int] = deque()
        self._lock = threading.Lock()

    def store(self, data: Tensor, ready: Any) -> _PinnedBuffer | None:
        """See base class."""
        num_taken = self.copy_engine.host_allocation_bytes(data.numel())
        with self._lock:
            while self._freed:
                self._used_bytes -= self._freed.popleft()
            if self._used_bytes + num_taken > self._limit_bytes:
                return None
            try:
                buffer = _PinnedBuffer(self.copy_engine.allocate_host(data.numel()), num_taken, self._freed)
            except RuntimeError as error:
                self._limit_bytes = self._used_bytes
                raise OSError(errno.ENOMEM, str(error).partition("\n")[0]) from error
            self._used_bytes += num_taken
        self.copy_engine.to_host(data, ready, buffer.host)
        return buffer

    def load(self, stored: _PinnedBuffer, out: Tensor, ready: Any) -> Any:
        """See base class."""
        return self.copy_engine.to_device_async(stored.host, out, ready)


STALE_GROWTH_FACTOR = 1.5
"""Growth factor of a bandwidth estimate in a step without transfers, so that offload is tried again."""


class BandwidthMeter:
    """Bytes and busy time of one direction, thread-safe.

    Concurrent transfers share the bandwidth, so the busy time is the time while at least one of them runs.

    Args:
        clock: time in seconds, from an arbitrary start.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._num_running = 0
        self._busy_since_s = 0.0
        self._busy_s = 0.0
        self._bytes = 0
        self._bytes_per_s = math.inf

    @property
    def bytes_per_s(self) -> float:
        """Bandwidth of this step, or of earlier steps if it has no transfer yet. Infinite if unknown."""
        with self._lock:
            return self._bytes / self._busy_s if self._bytes and self._busy_s else self._bytes_per_s

    @contextmanager
    def measure_transfer(self, num_bytes: int) -> Iterator[None]:
        """Measure a transfer of `num_bytes` inside this context. The bytes do not count if it fails."""
        with self._lock:
            if self._num_running == 0:
                self._busy_since_s = self._clock()
            self._num_running += 1
        num_transferred = 0
        try:
            yield
            num_transferred = num_bytes
        finally:
            with self._lock:
                self._num_running -= 1
                self._bytes += num_transferred
                if self._num_running == 0:
                    self._busy_s += self._clock() - self._busy_since_s

    def end_step(self) -> tuple[int, float]:
        """Return bytes and busy seconds since the last call, and start the next step."""
        with self._lock:
            measured = self._bytes, self._busy_s
            if self._bytes and self._busy_s:
                self._bytes_per_s = self._bytes / self._busy_s
            else:
                self._bytes_per_s *= STALE_GROWTH_FACTOR
            self._bytes = 0
            self._busy_s = 0.0
            return measured
