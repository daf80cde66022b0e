"""Every byte of tensor memory by the part of the step that made it, over the time of a step.

It watches each operation and notes the memory of its results until it is freed, so it works on every device, on meta
tensors as well, and needs no allocator to ask. Libraries' own buffers and what kernels use inside are not seen.

The most memory that this process has used.
"""

import resource
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any, Literal, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from moefold.comm.resumable import Resumable, ResumableTask
from moefold.comm.torch_compat import CAST_OP, TorchDispatchMode, local_tensor, storage_key, tree_iter

P = ParamSpec("P")
T = TypeVar("T")
Phase = Literal["before", "forward", "backward"]
UNTAGGED = "other"
GATHERED_WEIGHTS = "gathered weights"


@dataclass(slots=True, eq=False)
class Allocation:
    """Memory of one storage."""

    size: int
    part: str
    phase: Phase
    is_tagged: bool = False
    """Whether its part is known for good: of what it was made in does not matter."""


@dataclass(frozen=True)
class MemoryPeak:
    """The most that was in memory at once."""

    total: int
    by_part: dict[str, int]
    """Bytes of each part at that moment."""


class MemoryTracker(TorchDispatchMode):
    """Context manager: inside, notes what every operation allocates, and when it is freed.

    `part` says which part of the model runs. What is made in a backward pass is workspace, unless it is found to be
    something that stays.
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
        """What is made inside belongs to this part."""
        self._part_stack.append(name)
        try:
            yield
        finally:
            self._part_stack.pop()

    def scoped(self, name: str, function: Callable[P, T]) -> Callable[P, T]:
        """The same function, whose memory belongs to a part."""

        @wraps(function)
        def run(*args: P.args, **kwargs: P.kwargs) -> T:
            with self.part(name):
                return function(*args, **kwargs)

        return run

    def scoped_resumable(self, name: str, function: Callable[P, Resumable[T]]) -> Callable[P, Resumable[T]]:
        """The same steps, whose memory belongs to a part; what runs while they pause belongs to others."""

        @wraps(function)
        def run(*args: P.args, **kwargs: P.kwargs) -> Resumable[T]:
            begun = ResumableTask(function(*args, **kwargs))
            while True:
                with self.part(name):
                    begun.resume()
                if begun.is_done:
                    return begun.run_to_end()
                yield

        return run

    def tag(self, name: str, tensors: Iterable[Tensor]) -> None:
        """These tensors are this part, whenever and wherever they were made."""
        for tensor in tensors:
            block = self._allocation(tensor)
            block.part, block.is_tagged = name, True

    def tag_survivors(self, name: str) -> None:
        """What a backward pass made and has left is this part."""
        for block in self._live_allocations():
            if block.phase == "backward" and block.part == UNTAGGED and not block.is_tagged:
                block.part, block.is_tagged = name, True

    def tag_untagged(self, name: str) -> None:
        """What has no part yet is this one."""
        for block in self._live_allocations():
            if block.part == UNTAGGED and not block.is_tagged:
                block.part, block.is_tagged = name, True

    def retag(self, old: str, new: str) -> None:
        """What of a part is there now belongs to another one."""
        for block in self._live_allocations():
            if block.is_tagged and block.part == old:
                block.part = new

    def current(self) -> dict[str, int]:
        """Bytes of each part now."""
        found: dict[str, int] = {}
        for block in self._live_allocations():
            found[self._effective_part(block)] = found.get(self._effective_part(block), 0) + block.size
        return found

    def peak(self, is_counted: Callable[[str], bool] = lambda part: True) -> MemoryPeak:
        """The moment at which some parts together had most bytes."""
        self._record_frees()
        now = best = 0
        best_at = 0
        for i, (change, block) in enumerate(self._events, 1):
            if is_counted(self._effective_part(block)):
                now += change
                if now > best:
                    best, best_at = now, i
        by_part: dict[str, int] = {}
        for change, block in self._events[:best_at]:
            by_part[self._effective_part(block)] = by_part.get(self._effective_part(block), 0) + change
        return MemoryPeak(best, {part: size for part, size in by_part.items() if size})

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:
            # It takes itself apart, and its local operations come here.
            return NotImplemented
        if func.namespace == "fsdp" and self.phase != "backward":
            # Weights on their way: what FSDP copies them together in, and what it receives.
            self.tag(
                GATHERED_WEIGHTS,
                (x for x in tree_iter(args) if isinstance(x, Tensor) and not self._allocation(x).is_tagged),
            )
        result = func(*args, **(kwargs or {}))
        for leaf in tree_iter(result):
            if isinstance(leaf, Tensor):
                block = self._allocation(leaf)
                if func is CAST_OP and self._allocation(args[0]).part == "weights":
                    # One rank by itself reads its weights through casts.
                    block.part, block.is_tagged = GATHERED_WEIGHTS, True
        return result

    def __enter__(self) -> "MemoryTracker":
        self._thread_id = threading.get_ident()
        # FSDP frees and refills the memory of gathered weights by resizing it, which is no operation.
        self._resize = torch.UntypedStorage.resize_
        resize = self._resize

        @wraps(resize)
        def watched(storage: torch.UntypedStorage, size: int) -> Any:
            found = resize(storage, size)
            self._record_resize(storage, size)
            return found

        torch.UntypedStorage.resize_ = watched  # type: ignore[method-assign, assignment]
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]

    def _allocation(self, tensor: Tensor) -> Allocation:
        storage = local_tensor(tensor).untyped_storage()
        key = storage_key(storage)
        self._record_frees()
        if key not in self._live:
            block = Allocation(storage.nbytes(), self._part_stack[-1], self.phase)
            self._live[key] = block
            self._events.append((block.size, block))
            self._references[key] = weakref.ref(storage, lambda _: self._freed.append(key))
        return self._live[key]

    def _live_allocations(self) -> list[Allocation]:
        self._record_frees()
        return list(self._live.values())

    def _record_frees(self) -> None:
        # Other threads free what is offloaded, at any moment: they only say so, and the thread of the passes takes it
        # up before it looks anything up, so that an address that was used anew is not taken for the old one.
        while self._freed:
            key = self._freed.popleft()
            block = self._live.pop(key)
            del self._references[key]
            self._events.append((-block.size, block))

    def _record_resize(self, storage: torch.UntypedStorage, size: int) -> None:
        if threading.get_ident() != self._thread_id:
            # What was made in another thread is not looked after.
            return
        self._record_frees()
        block = self._live.get(storage_key(storage))
        if block is not None:
            self._events.append((size - block.size, block))
            block.size, block.part, block.is_tagged = size, GATHERED_WEIGHTS, True

    def _effective_part(self, allocation: Allocation) -> str:
        # Where a part runs in a backward pass, it runs again: what it makes are activations.
        is_workspace = allocation.phase == "backward" and allocation.part == UNTAGGED and not allocation.is_tagged
        return "workspace" if is_workspace else allocation.part


GIB = 2**30
_PROCESS_STATUS = Path("/proc/self/status")


def peak_memory_gib(device_type: str) -> float:
    """Return the peak memory of this process in GiB, since it started.

    On `cuda` this is the most that tensors held at once on the current device (`torch.cuda.max_memory_allocated`):
    it is what a recipe's sizes decide. The caching allocator's unused blocks, the CUDA context and NCCL's buffers come
    on top, so leave some room above it.

    On `cpu` it is the peak resident set of the process, code and libraries included (about 0.3 GiB for torch): there
    is no allocator of tensors alone to ask. Linux tells it as VmHWM. `getrusage`, which other systems have, is second
    choice, because a child inherits its parent's peak there.

    Args:
        device_type: "cuda" or "cpu".
    """
    if device_type == "cuda":
        import torch

        return float(torch.cuda.max_memory_allocated()) / GIB
    if _PROCESS_STATUS.exists():
        for line in _PROCESS_STATUS.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024 / GIB
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    peak_bytes = peak if sys.platform == "darwin" else peak * 1024
    return peak_bytes / GIB
