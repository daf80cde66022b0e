"""Where offloaded bytes go, and how they get there from the device: the interface, and host memory.

How fast one direction carries bytes, measured while it does.
"""

import errno
import math
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor


class OffloadBackend(Protocol):
    """A place for bytes. `store` and `load` run on threads beside training, several at a time."""

    name: str
    """For messages."""

    @property
    def copy_engine(self) -> "CopyEngine":
        """The way between the device and the host."""
        ...

    def store(self, data: Tensor, ready: Any) -> Any:
        """Copy bytes.

        Args:
            data: uint8 [bytes] on the device.
            ready: what `CopyEngine.mark` gave when the data was made.

        Returns:
            What `load` wants; the room is free again once nobody holds it. None: there is no room.

        Raises:
            OSError: they cannot be stored.
        """
        ...

    def load(self, stored: Any, out: Tensor, ready: Any) -> Any:
        """Bring bytes back.

        Args:
            stored: what `store` gave.
            out: uint8 [bytes] on the device, to be filled.
            ready: what `CopyEngine.mark` gave when `out` was made.

        Returns:
            What `CopyEngine.wait` wants before `out` is read.

        Raises:
            RunError: they are lost, or not what was stored.
        """
        ...


class CopyEngine:
    """Copies between the memory of a device and that of the host, beside what the device computes.

    On CUDA each direction has a stream of its own. On the CPU the two are one memory, and there is nothing to wait for.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._is_cuda = device.type == "cuda"
        self._d2h_stream, self._h2d_stream = (torch.cuda.Stream(device) if self._is_cuda else None for _ in range(2))

    def init_thread(self) -> None:
        """Let this thread work for the device: host memory is locked for the current one, which is another at first."""
        if self._is_cuda:
            torch.cuda.set_device(self.device)

    def record_event(self) -> Any:
        """Everything that the device was told so far."""
        return torch.cuda.current_stream(self.device).record_event() if self._is_cuda else None

    def host_allocation_bytes(self, num_bytes: int) -> int:
        """What room for so many bytes takes."""
        return pinned_allocation_bytes(num_bytes) if self._is_cuda else num_bytes

    def allocate_host(self, num_bytes: int) -> Tensor:
        """Uint8 [bytes] of host memory that the device can reach by itself."""
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self._is_cuda)

    def allocate_device(self, num_bytes: int) -> Tensor:
        """Uint8 [bytes] of device memory; called by the thread that will use it."""
        room = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
        if self._h2d_stream is not None:
            room.record_stream(self._h2d_stream)
        return room

    def to_host(self, data: Tensor, ready: Any, host: Tensor) -> Tensor:
        """Fill `host`; returns once it is filled."""
        self.synchronize(self.to_host_async(data, ready, host))
        return host

    def to_host_async(self, data: Tensor, ready: Any, host: Tensor) -> Any:
        """Begin to fill `host`; returns what `synchronize` wants. Until then `data` must be held."""
        if self._d2h_stream is None:
            host.copy_(data)
            return None
        with torch.cuda.stream(self._d2h_stream):
            self._d2h_stream.wait_event(ready)
            host.copy_(data, non_blocking=True)
            return self._d2h_stream.record_event()

    def synchronize(self, event: Any) -> None:
        """Returns once what `to_host_async` began is done."""
        if event is not None:
            event.synchronize()

    def to_device_async(self, host: Tensor, out: Tensor, ready: Any) -> Any:
        """Begin to fill `out`; returns what to wait for."""
        if self._h2d_stream is None:
            out.copy_(host)
            return None
        with torch.cuda.stream(self._h2d_stream):
            self._h2d_stream.wait_event(ready)
            out.copy_(host, non_blocking=True)
            return self._h2d_stream.record_event()

    def wait_event(self, event: Any) -> None:
        """What the device is told from now on finds the copy done."""
        if event is not None:
            torch.cuda.current_stream(self.device).wait_event(event)


def pinned_allocation_bytes(num_bytes: int) -> int:
    """What torch takes for so many bytes: a power of two (ATen/core/CachingHostAllocator.h, `allocate`)."""
    return 1 << (num_bytes - 1).bit_length()


@dataclass(frozen=True)
class _PinnedBuffer:
    """Bytes in host memory, which count until nobody holds this object."""

    host: Tensor
    allocated_bytes: int
    """With what the allocator rounds up."""
    _freed: deque[int]

    def __del__(self) -> None:
        self._freed.append(self.allocated_bytes)


class HostMemory:
    """Memory of the host; on CUDA page-locked, in which copies run beside the computation.

    Args:
        copy_engine: to the device.
        limit_bytes: most that is held at a time, with what the allocator rounds up.
    """

    name = "host memory"

    def __init__(self, copy_engine: CopyEngine, limit_bytes: float = math.inf) -> None:
        self.copy_engine = copy_engine
        self._limit_bytes = limit_bytes
        self._used_bytes = 0
        self._freed: deque[int] = deque()
        self._lock = threading.Lock()

    def store(self, data: Tensor, ready: Any) -> _PinnedBuffer | None:
        """See `OffloadBackend.store`."""
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
        """See `OffloadBackend.load`."""
        return self.copy_engine.to_device_async(stored.host, out, ready)


STALE_GROWTH_FACTOR = 1.5
"""In a step that carried nothing an old measurement is believed less by this factor, so that it is tried again."""


class BandwidthMeter:
    """Bytes and busy time of one direction; for any number of threads.

    Several jobs at once share what the direction carries, so what counts is the time in which at least one ran.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_running = 0
        self._busy_since_s = 0.0
        self._busy_s = 0.0
        self._bytes = 0
        self._bytes_per_s = math.inf

    @property
    def bytes_per_s(self) -> float:
        """Of this step, or, as long as it has carried nothing, of those before; infinite where nothing is known."""
        with self._lock:
            return self._bytes / self._busy_s if self._bytes and self._busy_s else self._bytes_per_s

    @contextmanager
    def measure_transfer(self, num_bytes: int) -> Iterator[None]:
        """Inside, one job carries so many bytes; they do not count if it fails."""
        with self._lock:
            if self._num_running == 0:
                self._busy_since_s = time.perf_counter()
            self._num_running += 1
        carried = 0
        try:
            yield
            carried = num_bytes
        finally:
            with self._lock:
                self._num_running -= 1
                self._bytes += carried
                if self._num_running == 0:
                    self._busy_s += time.perf_counter() - self._busy_since_s

    def end_step(self) -> tuple[int, float]:
        """Bytes and busy seconds since the last call; what follows belongs to the next step."""
        with self._lock:
            measured = self._bytes, self._busy_s
            if self._bytes and self._busy_s:
                self._bytes_per_s = self._bytes / self._busy_s
            else:
                self._bytes_per_s *= STALE_GROWTH_FACTOR
            self._bytes = 0
            self._busy_s = 0.0
            return measured
