"""Memory tracker: tensor bytes by the part of the step that allocated them.

`MemoryTracker` is a dispatch mode that records the storage of each operation's results until it is freed. It works on
every device, including meta tensors, without an allocator. Internal buffers of libraries and kernels are not tracked.
"""

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from moefold.comm.private_torch import CAST_OP, TorchDispatchMode, local_tensor, storage_key, tree_iter
from moefold.model.module_wrapper import CallContext, Function, wrap_calls, wrap_method

Phase = Literal["before", "forward", "backward"]
UNTAGGED = "other"
GATHERED_WEIGHTS = "gathered weights"


@dataclass(slots=True, eq=False)
class Allocation:
    """One tracked storage."""

    size: int
    part: str
    phase: Phase
    is_tagged: bool = False
    """True if the part was set explicitly, independent of the part that allocated the storage."""


@dataclass(frozen=True)
class MemoryPeak:
    """Peak of tracked bytes."""

    total: int
    by_part: dict[str, int]
    """Bytes of each part at the peak."""


class MemoryTracker(TorchDispatchMode):
    """Context manager that records the allocations of every operation and their frees.

    `part` sets the current part of the model. Allocations of a backward pass count as workspace unless they are tagged.
    """

    def __init__(self) -> None:
        super().__init__()
        self.phase: Phase = "before"
        self._part_stack: list[str] = [UNTAGGED]
        self._live: dict[int, Allocation] = {}
        self._references: dict[int, weakref.ref[Any]] = {}
        self._events: list[tuple[int, Allocation]] = []
        self._freed: deque[int] = deque()

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Attribute allocations inside the block to a part."""
        self._part_stack.append(name)
        try:
            yield
        finally:
            self._part_stack.pop()

    def scoped(self, name: str, function: Function) -> Function:
        """Wrap a function, plain or resumable, so that its allocations are attributed to a part."""
        return wrap_calls(function, lambda *args, **kwargs: CallContext(partial(self.part, name)))

    def tag(self, name: str, tensors: Iterable[Tensor]) -> None:
        """Assign tensors to a part, independent of the part that allocated them."""
        for tensor in tensors:
            block = self._allocation(tensor)
            block.part = name
            block.is_tagged = True

    def leave_out(self, tensors: Iterable[Tensor]) -> None:
        """Exclude the storages of tensors from all counts."""
        for tensor in tensors:
            self._allocation(tensor, is_counted=False)

    def tag_remaining(self, name: str) -> None:
        """Assign the live, untagged allocations of the backward pass to a part."""
        for block in self._live_allocations():
            if block.phase == "backward" and block.part == UNTAGGED and not block.is_tagged:
                block.part = name
                block.is_tagged = True

    def move_tag(self, old: str, new: str) -> None:
        """Move the live, tagged allocations of one part to another."""
        for block in self._live_allocations():
            if block.is_tagged and block.part == old:
                block.part = new

    def current(self) -> dict[str, int]:
        """Return the live bytes of each part."""
        by_part: dict[str, int] = {}
        for block in self._live_allocations():
            by_part[self._effective_part(block)] = by_part.get(self._effective_part(block), 0) + block.size
        return by_part

    def peak(self, is_counted: Callable[[str], bool] = lambda part: True) -> MemoryPeak:
        """Return the peak of the total bytes of the counted parts, with the bytes of all parts at that time."""
        self._record_frees()
        current = best = 0
        best_at = 0
        for i, (change, block) in enumerate(self._events, 1):
            if is_counted(self._effective_part(block)):
                current += change
                if current > best:
                    best = current
                    best_at = i
        by_part: dict[str, int] = {}
        for change, block in self._events[:best_at]:
            by_part[self._effective_part(block)] = by_part.get(self._effective_part(block), 0) + change
        return MemoryPeak(best, {part: size for part, size in by_part.items() if size})

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:
            # DTensor redispatches on its local tensors, which are tracked.
            return NotImplemented
        if func.namespace == "fsdp" and self.phase != "backward":
            # FSDP's all-gather buffers: the copy-in input and the gathered output.
            self.tag(
                GATHERED_WEIGHTS,
                (x for x in tree_iter(args) if isinstance(x, Tensor) and not self._allocation(x).is_tagged),
            )
        result = func(*args, **(kwargs or {}))
        for leaf in tree_iter(result):
            if isinstance(leaf, Tensor):
                block = self._allocation(leaf)
                if func is CAST_OP and self._allocation(args[0]).part == "weights":
                    # Without FSDP, low-precision weights are copies of the master weights.
                    block.part = GATHERED_WEIGHTS
                    block.is_tagged = True
        return result

    def __enter__(self) -> "MemoryTracker":
        self._thread_id = threading.get_ident()
        # FSDP frees and refills gathered weights by storage.resize_(), which is not dispatched.
        self._undo_resize = wrap_method(torch.UntypedStorage, "resize_", self._track_resize)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._undo_resize()

    def _track_resize(self, resize: Function) -> Function:
        @wraps(resize)
        def tracked_resize(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            self._record_resize(storage, size)
            return result

        return tracked_resize

    def _allocation(self, tensor: Tensor, *, is_counted: bool = True) -> Allocation:
        storage = local_tensor(tensor).untyped_storage()
        key = storage_key(storage)
        self._record_frees()
        if key not in self._live:
            block = Allocation(storage.nbytes() if is_counted else 0, self._part_stack[-1], self.phase)
            self._live[key] = block
            self._events.append((block.size, block))
            self._references[key] = weakref.ref(storage, lambda _: self._freed.append(key))
        return self._live[key]

    def _live_allocations(self) -> list[Allocation]:
        self._record_frees()
        return list(self._live.values())

    def _record_frees(self) -> None:
        # Offload threads free storages at any time: their weakref callbacks only enqueue the key. The training thread
        # drains the queue before each look-up, so that a reused address is not mistaken for the freed storage.
        while self._freed:
            key = self._freed.popleft()
            block = self._live.pop(key)
            del self._references[key]
            self._events.append((-block.size, block))

    def _record_resize(self, storage: torch.UntypedStorage, size: int) -> None:
        if threading.get_ident() != self._thread_id:
            # Allocations of other threads are not tracked.
            return
        self._record_frees()
        block = self._live.get(storage_key(storage))
        if block is not None:
            self._events.append((size - block.size, block))
            block.size = size
            block.part = GATHERED_WEIGHTS
            block.is_tagged = True

    def _effective_part(self, allocation: Allocation) -> str:
        # A part that runs in the backward pass is recomputed: its allocations are activations, not workspace.
        is_workspace = allocation.phase == "backward" and allocation.part == UNTAGGED and not allocation.is_tagged
        return "workspace" if is_workspace else allocation.part
