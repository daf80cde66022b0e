"""How much memory tensors take at most: counted, because the size of a process says little about a single step."""

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class StorageMeter(TorchDispatchMode):
    """Inside, counts the bytes of all storages that operations return, from when they come to when they go.

    Attributes:
        peak_bytes: the most that lived at once; what lived before does not count.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak_bytes = 0
        self._live_storages: dict[int, int] = {}
        self._live_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation and look at what it returns."""
        result = func(*args, **(kwargs or {}))
        known = {self._key(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and self._key(leaf) not in known:
                self._add(leaf.untyped_storage())
        return result

    def _key(self, tensor: torch.Tensor) -> int:
        return tensor.untyped_storage()._cdata

    def _add(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._live_storages:
            return
        self._live_storages[key] = storage.nbytes()
        self._live_bytes += self._live_storages[key]
        self.peak_bytes = max(self.peak_bytes, self._live_bytes)
        weakref.finalize(storage, self._remove, key)

    def _remove(self, key: int) -> None:
        self._live_bytes -= self._live_storages.pop(key)
