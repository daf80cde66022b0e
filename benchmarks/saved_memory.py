"""Measurement of the bytes that a forward pass saves for backward, in graphs, hooks or closures."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from moefold.comm.private_torch import TorchDispatchMode, storage_key, tree_leaves

T = TypeVar("T")


def measure_saved_bytes(run: Callable[[], T]) -> tuple[T, int]:
    """Run a function; return its result and the bytes allocated meanwhile that are still alive, the result included."""
    with _StorageTracker() as tracker:
        result = run()
    return result, tracker.alive_bytes()


class _StorageTracker(TorchDispatchMode):
    """Dispatch mode that tracks the storage of every operation's results by weak reference."""

    def __init__(self) -> None:
        super().__init__()
        self._created: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inputs = {
            storage_key(leaf.untyped_storage()) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)
        }
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and storage_key(leaf.untyped_storage()) not in inputs:
                storage = leaf.untyped_storage()
                self._created[storage_key(storage)] = StorageWeakRef(storage), storage.nbytes()
        return result

    def alive_bytes(self) -> int:
        """Return the bytes of tracked storages that are not freed."""
        return sum(size for reference, size in self._created.values() if not reference.expired())
