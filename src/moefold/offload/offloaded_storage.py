"""Storage of saved tensors under activation offload: resident, being stored, offloaded, or being loaded."""

import threading
import weakref
from concurrent.futures import Future
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from moefold.comm.private_torch import tensor_version
from moefold.offload.backend import OffloadBackend


class OffloadedStorage:
    """The storage of some saved tensors, used by the training thread, and stored by one I/O thread at a time.

    It exists as long as the autograd graph references one of these tensors. A loaded storage stays until then.

    Args:
        tensor: one of the saved tensors.
    """

    def __init__(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        # Keeps the address from being reused by another storage, as offloaded storages are looked up by address.
        self._address = StorageWeakRef(storage)
        self.num_bytes = storage.nbytes()
        self.version = tensor_version(tensor)
        self.part_run: PartRun | None = None
        """The part run that offloads it, or None for a storage that stays on the device."""
        self.is_assigned = False
        self._alias: Tensor | None = tensor.detach()
        self._data: Tensor | None = bytes_of(tensor)
        self._stored: Any = None
        self._must_stay = False
        self._lock = threading.Lock()
        self.store_future: Future[None] | None = None
        self._load_future: Future[tuple[Tensor, Any]] | None = None

    def begin_store(self) -> Tensor | None:
        """Return the bytes to store, or None if they are needed already. Runs on an I/O thread."""
        with self._lock:
            return None if self._must_stay else self._data

    def end_store(self, stored: Any) -> bool:
        """Free the memory unless it was needed or changed meanwhile. Return whether it was. Runs on an I/O thread."""
        with self._lock:
            if self._must_stay or self._alias is None or tensor_version(self._alias) != self.version:
                return False
            self._stored = stored
            self._data = None
            self._alias = None
            return True

    def keep_resident(self) -> bool:
        """Cancel storing and keep the memory if it is still resident, and return whether it is.

        Raises:
            Exception: storing failed unexpectedly.
        """
        with self._lock:
            self._must_stay = True
            if self._data is None:
                return False
        if self.store_future is not None and not self.store_future.cancel() and self.store_future.done():
            self.store_future.result()
        return True

    def begin_load(self, load: Any, backend: OffloadBackend) -> None:
        """Start loading on an I/O thread, unless already started.

        Args:
            load: submits a function with its arguments.
            backend: backend that holds the bytes.
        """
        if self._load_future is None:
            out = backend.copy_engine.allocate_device(self.num_bytes)
            self._load_future = load(_load, backend, self._stored, out, backend.copy_engine.record_event())

    def end_load(self, backend: OffloadBackend) -> None:
        """Wait until the storage is loaded.

        Raises:
            RunError: it is lost.
        """
        assert self._load_future is not None
        self._data, event = self._load_future.result()
        backend.copy_engine.wait_event(event)
        self._load_future = None
        self._stored = None

    def rebuild_tensor(self, ref: "SavedTensorRef") -> Tensor:
        """Rebuild a saved tensor from the resident storage.

        Raises:
            RuntimeError: it was modified in place after it was saved.
        """
        assert self._data is not None
        if self._alias is not None and tensor_version(self._alias) != self.version:
            raise RuntimeError(
                "a tensor that the backward pass needs was modified in place after it was saved: version "
                f"{tensor_version(self._alias)} instead of {self.version}, of size {tuple(ref.size)}"
            )
        tensor = torch.empty(0, dtype=ref.dtype, device=self._data.device)
        return tensor.set_(self._data.untyped_storage(), ref.offset, ref.size, ref.stride)


class SavedTensorRef:
    """Reference to one saved tensor in an offloaded storage, held by autograd instead of the tensor."""

    __slots__ = ("dtype", "offset", "storage", "size", "stride")

    def __init__(self, storage: OffloadedStorage, tensor: Tensor) -> None:
        self.storage = storage
        self.dtype = tensor.dtype
        self.size = tensor.size()
        self.stride = tensor.stride()
        self.offset = int(tensor.storage_offset())


def bytes_of(tensor: Tensor) -> Tensor:
    """Return all bytes of a tensor's storage, uint8 [bytes], without a copy."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def _load(backend: OffloadBackend, stored: Any, out: Tensor, ready: Any) -> tuple[Tensor, Any]:
    return out, backend.load(stored, out, ready)


class PartRun:
    """One run of a model part, begun at `started_s`, whose storages are offloaded and loaded together."""

    def __init__(self, number: int, micro_batch: "MicroBatch", started_s: float) -> None:
        self.number = number
        self.micro_batch = micro_batch
        self.started_s = started_s
        self.is_reached = False
        self._storages: list[weakref.ref[OffloadedStorage]] = []

    def add(self, storage: OffloadedStorage) -> None:
        """Add a storage that this run offloads."""
        storage.part_run = self
        storage.is_assigned = True
        self._storages.append(weakref.ref(storage))

    def live_storages(self) -> list[OffloadedStorage]:
        """Return the storages that are still referenced, last first, in the order of the backward pass."""
        storages = [reference() for reference in reversed(self._storages)]
        return [storage for storage in storages if storage is not None]


class MicroBatch:
    """One forward pass of a stage, by its index in the step."""

    def __init__(self, index: int, long_lived_storages: frozenset[int]) -> None:
        self.index = index
        self.long_lived_storages = long_lived_storages
        """Storages that outlive the pass anyway."""
        self.part_runs: list[PartRun] = []
        self.num_waited = 0
        """Number of part runs whose copies have been waited for."""
