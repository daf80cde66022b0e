"""One storage that a forward pass keeps for the backward pass: in memory, on its way out, away, or on its way back."""

import threading
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from moefold.offload.tier import Tier

if TYPE_CHECKING:
    from moefold.offload.activations import Call


class Record:
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
        self.call: Call | None = None
        """The run of a part that gives it away, once anything keeps it; None for what stays."""
        self.is_given_away = False
        self._alias: Tensor | None = tensor.detach()
        self._data: Tensor | None = bytes_of(tensor)
        self._stored: Any = None
        self._is_claimed = False
        self._lock = threading.Lock()
        self.storing: Future[None] | None = None
        self._loading: Future[tuple[Tensor, Any]] | None = None

    def begin_store(self) -> Tensor | None:
        """Its bytes, to be stored; None if they are needed already. On an I/O thread."""
        with self._lock:
            return None if self._is_claimed else self._data

    def end_store(self, stored: Any) -> bool:
        """Let go of the memory, unless it was asked for meanwhile or has changed; whether it did. On an I/O thread."""
        with self._lock:
            if self._is_claimed or self._alias is None or self._alias._version != self.version:
                return False
            self._stored, self._data, self._alias = stored, None, None
            return True

    def claim(self) -> bool:
        """Keep the memory if it is still here, and store it no more; returns whether it is here.

        Raises:
            Exception: storing it failed in a way that nobody expected.
        """
        with self._lock:
            self._is_claimed = True
            if self._data is None:
                return False
        if self.storing is not None and not self.storing.cancel() and self.storing.done():
            self.storing.result()
        return True

    def begin_load(self, load: Any, tier: Tier) -> None:
        """Let an I/O thread bring it back; once.

        Args:
            load: submits a function with its arguments.
            tier: where it is.
        """
        if self._loading is None:
            out = tier.link.room_on_device(self.num_bytes)
            self._loading = load(_load, tier, self._stored, out, tier.link.mark())

    def end_load(self, tier: Tier) -> None:
        """Wait until it is back.

        Raises:
            RunError: it is lost.
        """
        assert self._loading is not None
        self._data, event = self._loading.result()
        tier.link.wait(event)
        self._loading, self._stored = None, None

    def view(self, like: "View") -> Tensor:
        """A saved tensor as it was; its memory is here.

        Raises:
            RuntimeError: it was modified in place after it was saved.
        """
        assert self._data is not None
        if self._alias is not None and self._alias._version != self.version:
            raise RuntimeError(
                "a tensor that the backward pass needs was modified in place after it was saved: version "
                f"{self._alias._version} instead of {self.version}, of size {tuple(like.size)}"
            )
        found = torch.empty(0, dtype=like.dtype, device=self._data.device)
        return found.set_(self._data.untyped_storage(), like.offset, like.size, like.stride)


class View:
    """One saved tensor: its place in the memory of a record. What autograd holds instead of the tensor."""

    __slots__ = ("dtype", "offset", "record", "size", "stride")

    def __init__(self, record: Record, tensor: Tensor) -> None:
        self.record = record
        self.dtype = tensor.dtype
        self.size = tensor.size()
        self.stride = tensor.stride()
        self.offset = int(tensor.storage_offset())


def bytes_of(tensor: Tensor) -> Tensor:
    """All memory behind a tensor, uint8 [bytes], without a copy."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def _load(tier: Tier, stored: Any, out: Tensor, ready: Any) -> tuple[Tensor, Any]:
    return out, tier.load(stored, out, ready)
