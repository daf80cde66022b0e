"""What a forward pass leaves in memory, whoever holds it: graphs, hooks or closures."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from moefold.comm.torch_compat import TorchDispatchMode, storage_key, tree_leaves

T = TypeVar("T")


def measure_saved_bytes(run: Callable[[], T]) -> tuple[T, int]:
    """Run something; its result, and the bytes of all memory made meanwhile that is alive with it, its own included."""
    with _StorageTracker() as watch:
        result = run()
    return result, watch.alive_bytes()


class _StorageTracker(TorchDispatchMode):
    """Notes the memory of every tensor that an operation makes, without holding it."""

    def __init__(self) -> None:
        super().__init__()
        self._created: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {
            storage_key(leaf.untyped_storage()) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)
        }
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and storage_key(leaf.untyped_storage()) not in given:
                storage = leaf.untyped_storage()
                self._created[storage_key(storage)] = StorageWeakRef(storage), storage.nbytes()
        return result

    def alive_bytes(self) -> int:
        """Of what was made, what is not freed."""
        return sum(size for reference, size in self._created.values() if not reference.expired())
