"""One storage that a forward pass keeps for the backward pass: in memory, on its way out, away, or on its way back."""

import threading
import time
import weakref
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from moefold.offload.backend import OffloadBackend

if TYPE_CHECKING:
    pass


class OffloadedStorage:
    """The memory behind some saved tensors; training calls it from one thread, and one I/O thread at a time stores it.

    It lives as long as the graph of autograd holds one of these tensors. What is brought back stays until then.

    Args:
        tensor: one of them.
    """

    def __init__(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        # Keeps the address from being given to another storage, by which a record is found.
        self._address = StorageWeakRef(storage)
        self.num_bytes = storage.nbytes()
        self.version = tensor._version
        self.part_run: PartRun | None = None
        """The run of a part that gives it away, once anything keeps it; None for what stays."""
        self.is_assigned = False
        self._alias: Tensor | None = tensor.detach()
        self._data: Tensor | None = bytes_of(tensor)
        self._stored: Any = None
        self._must_stay = False
        self._lock = threading.Lock()
        self.store_future: Future[None] | None = None
        self._load_future: Future[tuple[Tensor, Any]] | None = None

    def begin_store(self) -> Tensor | None:
        """Its bytes, to be stored; None if they are needed already. On an I/O thread."""
        with self._lock:
            return None if self._must_stay else self._data

    def end_store(self, stored: Any) -> bool:
        """Let go of the memory, unless it was asked for meanwhile or has changed; whether it did. On an I/O thread."""
        with self._lock:
            if self._must_stay or self._alias is None or self._alias._version != self.version:
                return False
            self._stored = stored
            self._data = None
            self._alias = None
            return True

    def keep_resident(self) -> bool:
        """Keep the memory if it is still here, and store it no more; returns whether it is here.

        Raises:
            Exception: storing it failed in a way that nobody expected.
        """
        with self._lock:
            self._must_stay = True
            if self._data is None:
                return False
        if self.store_future is not None and not self.store_future.cancel() and self.store_future.done():
            self.store_future.result()
        return True

    def begin_load(self, load: Any, backend: OffloadBackend) -> None:
        """Let an I/O thread bring it back; once.

        Args:
            load: submits a function with its arguments.
            backend: where it is.
        """
        if self._load_future is None:
            out = backend.copy_engine.allocate_device(self.num_bytes)
            self._load_future = load(_load, backend, self._stored, out, backend.copy_engine.record_event())

    def end_load(self, backend: OffloadBackend) -> None:
        """Wait until it is back.

        Raises:
            RunError: it is lost.
        """
        assert self._load_future is not None
        self._data, event = self._load_future.result()
        backend.copy_engine.wait_event(event)
        self._load_future = None
        self._stored = None

    def rebuild_tensor(self, ref: "SavedTensorRef") -> Tensor:
        """A saved tensor as it was; its memory is here.

        Raises:
            RuntimeError: it was modified in place after it was saved.
        """
        assert self._data is not None
        if self._alias is not None and self._alias._version != self.version:
            raise RuntimeError(
                "a tensor that the backward pass needs was modified in place after it was saved: version "
                f"{self._alias._version} instead of {self.version}, of size {tuple(ref.size)}"
            )
        found = torch.empty(0, dtype=ref.dtype, device=self._data.device)
        return found.set_(self._data.untyped_storage(), ref.offset, ref.size, ref.stride)


class SavedTensorRef:
    """One saved tensor: its place in the memory of a record. What autograd holds instead of the tensor."""

    __slots__ = ("dtype", "offset", "storage", "size", "stride")

    def __init__(self, storage: OffloadedStorage, tensor: Tensor) -> None:
        self.storage = storage
        self.dtype = tensor.dtype
        self.size = tensor.size()
        self.stride = tensor.stride()
        self.offset = int(tensor.storage_offset())


def bytes_of(tensor: Tensor) -> Tensor:
    """All memory behind a tensor, uint8 [bytes], without a copy."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def _load(backend: OffloadBackend, stored: Any, out: Tensor, ready: Any) -> tuple[Tensor, Any]:
    return out, backend.load(stored, out, ready)


class PartRun:
    """One run of a part, whose storages go and come together."""

    def __init__(self, number: int, micro_batch: "MicroBatch") -> None:
        self.number = number
        self.micro_batch = micro_batch
        self.started_s = time.perf_counter()
        self.is_reached = False
        self._storages: list[weakref.ref[OffloadedStorage]] = []

    def add(self, storage: OffloadedStorage) -> None:
        """A storage that it gives away."""
        storage.part_run = self
        storage.is_assigned = True
        self._storages.append(weakref.ref(storage))

    def live_storages(self) -> list[OffloadedStorage]:
        """Those that are still wanted, last first, as the backward pass asks for them."""
        found = [reference() for reference in reversed(self._storages)]
        return [record for record in found if record is not None]


class MicroBatch:
    """One forward pass of a stage, by its place among those of the step."""

    def __init__(self, index: int, long_lived_storages: frozenset[int]) -> None:
        self.index = index
        self.long_lived_storages = long_lived_storages
        """Storages that outlive the pass anyway."""
        self.part_runs: list[PartRun] = []
        self.num_waited = 0
        """Calls whose copies were waited for."""
