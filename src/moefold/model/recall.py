"""What is not kept for the backward pass, but made again there: a whole part of a layer, or just what it hands on.

`recomputed` forgets all that happens inside a function and keeps its inputs. Its result is whatever the next operation
keeps, so for a cheap function with a large result, such as a norm, nothing would be gained. `recalled` forgets that
result: while the next operations run, what they would keep of it is replaced by a note how to make it again.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

Function = Callable[..., tuple[Tensor, ...]]


class Recall(Protocol):
    """Whether the results of a function live until the backward pass."""

    def __call__(self, function: Function, *tensors: Tensor) -> AbstractContextManager[tuple[Tensor, ...]]:
        """Give function(*tensors) to the operations inside the context.

        Args:
            function: of these tensors alone, which include the weights that it uses; does not communicate.
            tensors: its arguments; gradients go to them.
        """
        ...


@contextmanager
def all_kept(function: Function, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Nothing is made again."""
    yield function(*tensors)


@contextmanager
def recalled(function: Function, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """What the operations inside would keep of the results is made again, once, when the first of them needs it."""
    if not torch.is_grad_enabled() or not any(tensor.requires_grad for tensor in tensors):
        yield function(*tensors)
        return
    cell = _Cell(function)
    results = _Recalled.apply(cell, *tensors)
    with saved_tensors_hooks(cell.watch(results), _unpack):
        yield results


def recomputed(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, which keeps its arguments alone, and runs once more in the backward pass.

    What it communicates is communicated again: every rank of the groups runs it again too, at the same place.
    """

    def run(*args: Any, **kwargs: Any) -> Any:
        # No random number here comes from a generator: jitter follows from the step and the token's place.
        return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

    return run


class _Cell:
    """How to make the results of one call again, and the results while the backward pass needs them."""

    def __init__(self, function: Function) -> None:
        self._function = function
        self.context: Any = None
        self._again: tuple[list[Tensor], tuple[Tensor, ...]] | None = None

    def watch(self, results: tuple[Tensor, ...]) -> Callable[[Tensor], Any]:
        """A pack hook that replaces what lies in the memory of the results."""
        # Not the results themselves: the hook outlives the context.
        places = {(result.untyped_storage().data_ptr(), result.dtype): i for i, result in enumerate(results)}

        def pack(tensor: Tensor) -> Any:
            i = places.get((tensor.untyped_storage().data_ptr(), tensor.dtype)) if tensor.numel() else None
            if i is None:
                return tensor
            return self, i, tensor.size(), tensor.stride(), tensor.storage_offset()

        return pack

    def run(self) -> tuple[list[Tensor], tuple[Tensor, ...]]:
        """(inputs, results), with a graph between them; made at the first call."""
        if self._again is None:
            self._again = self.traced(self.context.saved_tensors)
        return self._again

    def traced(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], tuple[Tensor, ...]]:
        """(inputs, results) with a graph of their own: torch picks other kernels where nothing needs a gradient."""
        inputs = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in tensors]
        with torch.enable_grad():
            return inputs, self._function(*inputs)

    def forget(self) -> None:
        """The gradient has passed."""
        self._again = None


def _unpack(packed: Any) -> Tensor:
    if isinstance(packed, Tensor):
        return packed
    cell, i, size, stride, offset = packed
    result: Tensor = cell.run()[1][i].detach()
    return result.as_strided(size, stride, offset)


class _Recalled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, cell: _Cell, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(*tensors)
        ctx.cell, cell.context = cell, ctx
        return tuple(result.detach() for result in cell.traced(tensors)[1])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        inputs, results = ctx.cell.run()
        wanted = [tensor for tensor in inputs if tensor.requires_grad]
        found = iter(torch.autograd.grad(results, wanted, grads, allow_unused=True))
        ctx.cell.forget()
        return None, *(next(found) if tensor.requires_grad else None for tensor in inputs)
