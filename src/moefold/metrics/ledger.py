"""Every byte of tensor memory by the part of the step that made it, over the time of a step.

It watches each operation and notes the memory of its results until it is freed, so it works on every device, on meta
tensors as well, and needs no allocator to ask. Libraries' own buffers and what kernels use inside are not seen.
"""

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any, Literal, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from moefold.model.steps import Begun, Steps

P = ParamSpec("P")
T = TypeVar("T")
Phase = Literal["before", "forward", "backward"]
UNNAMED = "other"
GATHERED = "gathered weights"
_CAST = torch.ops.aten._to_copy.default


@dataclass(slots=True, eq=False)
class Block:
    """Memory of one storage."""

    size: int
    part: str
    phase: Phase
    is_settled: bool = False
    """Whether its part is known for good: of what it was made in does not matter."""


@dataclass(frozen=True)
class Peak:
    """The most that was in memory at once."""

    total: int
    by_part: dict[str, int]
    """Bytes of each part at that moment."""


class Ledger(TorchDispatchMode):
    """Context manager: inside, notes what every operation allocates, and when it is freed.

    `part` says which part of the model runs. What is made in a backward pass is workspace, unless it is found to be
    something that stays.
    """

    def __init__(self) -> None:
        super().__init__()
        self.phase: Phase = "before"
        self._parts: list[str] = [UNNAMED]
        self._alive: dict[int, Block] = {}
        self._references: dict[int, weakref.ref[Any]] = {}
        self._events: list[tuple[int, Block]] = []
        self._freed: deque[int] = deque()

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """What is made inside belongs to this part."""
        self._parts.append(name)
        try:
            yield
        finally:
            self._parts.pop()

    def labelled(self, name: str, function: Callable[P, T]) -> Callable[P, T]:
        """The same function, whose memory belongs to a part."""

        @wraps(function)
        def run(*args: P.args, **kwargs: P.kwargs) -> T:
            with self.part(name):
                return function(*args, **kwargs)

        return run

    def labelled_steps(self, name: str, function: Callable[P, Steps[T]]) -> Callable[P, Steps[T]]:
        """The same steps, whose memory belongs to a part; what runs while they pause belongs to others."""

        @wraps(function)
        def run(*args: P.args, **kwargs: P.kwargs) -> Steps[T]:
            begun = Begun(function(*args, **kwargs))
            while True:
                with self.part(name):
                    begun.go_on()
                if begun.is_done:
                    return begun.finish()
                yield

        return run

    def settle(self, name: str, tensors: Iterable[Tensor]) -> None:
        """These tensors are this part, whenever and wherever they were made."""
        for tensor in tensors:
            block = self._block(tensor)
            block.part, block.is_settled = name, True

    def settle_survivors(self, name: str) -> None:
        """What a backward pass made and has left is this part."""
        for block in self._blocks():
            if block.phase == "backward" and block.part == UNNAMED and not block.is_settled:
                block.part, block.is_settled = name, True

    def settle_unnamed(self, name: str) -> None:
        """What has no part yet is this one."""
        for block in self._blocks():
            if block.part == UNNAMED and not block.is_settled:
                block.part, block.is_settled = name, True

    def rename_alive(self, old: str, new: str) -> None:
        """What of a part is there now belongs to another one."""
        for block in self._blocks():
            if block.is_settled and block.part == old:
                block.part = new

    def current(self) -> dict[str, int]:
        """Bytes of each part now."""
        found: dict[str, int] = {}
        for block in self._blocks():
            found[self._name(block)] = found.get(self._name(block), 0) + block.size
        return found

    def peak(self, parts: Callable[[str], bool] = lambda part: True) -> Peak:
        """The moment at which some parts together had most bytes."""
        self._note_freed()
        now = best = 0
        best_at = 0
        for i, (change, block) in enumerate(self._events, 1):
            if parts(self._name(block)):
                now += change
                if now > best:
                    best, best_at = now, i
        by_part: dict[str, int] = {}
        for change, block in self._events[:best_at]:
            by_part[self._name(block)] = by_part.get(self._name(block), 0) + change
        return Peak(best, {part: size for part, size in by_part.items() if size})

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:
            # It takes itself apart, and its local operations come here.
            return NotImplemented
        if func.namespace == "fsdp" and self.phase != "backward":
            # Weights on their way: what FSDP copies them together in, and what it receives.
            self.settle(
                GATHERED, (x for x in tree_iter(args) if isinstance(x, Tensor) and not self._block(x).is_settled)
            )
        result = func(*args, **(kwargs or {}))
        for leaf in tree_iter(result):
            if isinstance(leaf, Tensor):
                block = self._block(leaf)
                if func is _CAST and self._block(args[0]).part == "weights":
                    # One rank by itself reads its weights through casts.
                    block.part, block.is_settled = GATHERED, True
        return result

    def __enter__(self) -> "Ledger":
        self._thread = threading.get_ident()
        # FSDP frees and refills the memory of gathered weights by resizing it, which is no operation.
        self._resize = torch.UntypedStorage.resize_
        resize = self._resize

        @wraps(resize)
        def watched(storage: torch.UntypedStorage, size: int) -> Any:
            found = resize(storage, size)
            self._note_resize(storage, size)
            return found

        torch.UntypedStorage.resize_ = watched  # type: ignore[method-assign, assignment]
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]

    def _block(self, tensor: Tensor) -> Block:
        local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
        storage = local.untyped_storage()
        key = storage._cdata
        self._note_freed()
        if key not in self._alive:
            block = Block(storage.nbytes(), self._parts[-1], self.phase)
            self._alive[key] = block
            self._events.append((block.size, block))
            self._references[key] = weakref.ref(storage, lambda _: self._freed.append(key))
        return self._alive[key]

    def _blocks(self) -> list[Block]:
        self._note_freed()
        return list(self._alive.values())

    def _note_freed(self) -> None:
        # Other threads free what is offloaded, at any moment: they only say so, and the thread of the passes takes it
        # up before it looks anything up, so that an address that was used anew is not taken for the old one.
        while self._freed:
            key = self._freed.popleft()
            block = self._alive.pop(key)
            del self._references[key]
            self._events.append((-block.size, block))

    def _note_resize(self, storage: torch.UntypedStorage, size: int) -> None:
        if threading.get_ident() != self._thread:
            # What was made in another thread is not looked after.
            return
        self._note_freed()
        block = self._alive.get(storage._cdata)
        if block is not None:
            self._events.append((size - block.size, block))
            block.size, block.part, block.is_settled = size, GATHERED, True

    def _name(self, block: Block) -> str:
        # Where a part runs in a backward pass, it runs again: what it makes are activations.
        is_workspace = block.phase == "backward" and block.part == UNNAMED and not block.is_settled
        return "workspace" if is_workspace else block.part
