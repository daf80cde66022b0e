"""What is not kept for the backward pass, but made again there: a whole part of a layer, or just what it hands on.

`checkpoint_wrapper` forgets all that happens inside a function and keeps its inputs. Its result is whatever the next operation
keeps, so for a cheap function with a large result, such as a norm, nothing would be gained. `checkpoint_without_output` forgets that
result: while the next operations run, what they would keep of it is replaced by a note how to make it again.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from moefold.comm.resumable import Resumable
from moefold.comm.torch_compat import innermost_saved_tensor_hooks

TensorFunction = Callable[..., tuple[Tensor, ...]]


class OutputCheckpoint(Protocol):
    """Whether the results of a function live until the backward pass."""

    def __call__(self, function: TensorFunction, *tensors: Tensor) -> AbstractContextManager[tuple[Tensor, ...]]:
        """Give function(*tensors) to the operations inside the context.

        Args:
            function: of these tensors alone, which include the weights that it uses; does not communicate.
            tensors: its arguments; gradients go to them.
        """
        ...


@contextmanager
def no_checkpoint(function: TensorFunction, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Nothing is made again."""
    yield function(*tensors)


@contextmanager
def checkpoint_without_output(function: TensorFunction, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """What the operations inside would keep of the results is made again, once, when the first of them needs it."""
    if not torch.is_grad_enabled() or not any(tensor.requires_grad for tensor in tensors):
        yield function(*tensors)
        return
    cell = _RecomputeContext(function)
    results = _CheckpointWithoutOutput.apply(cell, *tensors)
    with saved_tensors_hooks(cell.make_pack_hook(results), _unpack_output):
        yield results


def checkpoint_wrapper(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, which keeps its arguments alone, and runs once more in the backward pass.

    What it communicates is communicated again: every rank of the groups runs it again too, at the same place.
    """

    def run(*args: Any, **kwargs: Any) -> Any:
        # No random number here comes from a generator: jitter follows from the step and the token's place.
        return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

    return run


def checkpoint_resumable(
    function: Callable[..., Resumable[Tensor]], on_yield: Callable[[], None]
) -> Callable[..., Any]:
    """`checkpoint_wrapper` for a function that pauses, which a checkpoint of torch cannot: it would watch what runs meanwhile.

    Args:
        function: gives steps; its tensors are positional arguments.
        on_yield: called at each pause while it runs again.
    """

    def run(*args: Any) -> Resumable[Tensor]:
        if not torch.is_grad_enabled():
            return (yield from function(*args))
        memory = _ResumableCheckpoint(function, args, on_yield)
        steps = function(*args)
        while True:
            with saved_tensors_hooks(memory.pack, _unpack_resumable):
                try:
                    next(steps)
                except StopIteration as end:
                    result: Tensor = end.value
                    return result
            yield

    return run


class _ResumableCheckpoint:
    """How to make again what the steps of one call would have kept."""

    def __init__(
        self, function: Callable[..., Resumable[Tensor]], args: Sequence[Any], on_yield: Callable[[], None]
    ) -> None:
        self._function, self._on_yield = function, on_yield
        self._non_tensor_args = [None if isinstance(arg, Tensor) else arg for arg in args]
        self._tensor_indices = [i for i, arg in enumerate(args) if isinstance(arg, Tensor)]
        self._requires_grad = [args[i].requires_grad for i in self._tensor_indices]
        self._num_saved = 0
        self._recomputed: dict[int, Tensor] = {}
        self._saved_inputs: Tensor = _SaveInputs.apply(
            torch.empty(0, requires_grad=True), *(args[i] for i in self._tensor_indices)
        )

    def pack(self, tensor: Tensor) -> "tuple[_ResumableCheckpoint, int]":
        """A pack hook: the number of the tensor instead of it."""
        self._num_saved += 1
        return self, self._num_saved - 1

    def unpack(self, number: int) -> Tensor:
        """The tensor of that number, once."""
        if number not in self._recomputed:
            self._recompute()
        return self._recomputed.pop(number)

    def _recompute(self) -> None:
        args = list(self._non_tensor_args)
        kept = self._saved_inputs.grad_fn.saved_tensors  # type: ignore[union-attr]
        for i, tensor, wants in zip(self._tensor_indices, kept, self._requires_grad, strict=True):
            args[i] = tensor.detach().requires_grad_(wants)
        found: dict[int, Tensor] = {}

        def keep(tensor: Tensor) -> None:
            found[len(found)] = tensor.detach()

        with torch.enable_grad():
            # To the end, even if nothing is kept of it: where it stops must not differ between ranks.
            steps = self._function(*args)
            while not _advance(steps, keep):
                self._on_yield()
        assert len(found) == self._num_saved, "what runs again keeps what the first run kept"
        self._recomputed = found


def _advance(resumable: Resumable[Tensor], pack: Callable[[Tensor], None]) -> bool:
    """Take a step whose operations give to `pack` what they would keep; whether none was left."""
    with saved_tensors_hooks(pack, _reject_unpack):
        return next(resumable, _END) is _END


_END = object()


def _unpack_resumable(packed: tuple[_ResumableCheckpoint, int]) -> Tensor:
    memory, number = packed
    return memory.unpack(number)


def _reject_unpack(packed: None) -> Tensor:
    raise AssertionError("nobody goes backwards through what runs again")


class _SaveInputs(torch.autograd.Function):
    """Keeps arguments as an operation would, so that those which the hooks around forget are forgotten here too."""

    @staticmethod
    def forward(ctx: Any, node: Tensor, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return node.clone()


class _RecomputeContext:
    """How to make the results of one call again, and the results while the backward pass needs them."""

    def __init__(self, function: TensorFunction) -> None:
        self._function = function
        self.ctx: Any = None
        self._recomputed: tuple[list[Tensor], tuple[Tensor, ...]] | None = None

    def make_pack_hook(self, results: tuple[Tensor, ...]) -> Callable[[Tensor], Any]:
        """A pack hook that replaces what lies in the memory of the results."""
        # Not the results themselves: the hook outlives the context.
        places = {(result.untyped_storage().data_ptr(), result.dtype): i for i, result in enumerate(results)}
        # Torch asks the innermost hooks alone: what they do not want is for those around them.
        outer = innermost_saved_tensor_hooks()

        def pack(tensor: Tensor) -> Any:
            i = places.get((tensor.untyped_storage().data_ptr(), tensor.dtype)) if tensor.numel() else None
            if i is not None:
                return self, i, tensor.size(), tensor.stride(), tensor.storage_offset()
            return tensor if outer is None else _OuterPacked(outer[0](tensor), outer[1])

        return pack

    def recompute(self) -> tuple[list[Tensor], tuple[Tensor, ...]]:
        """(inputs, results), with a graph between them; made at the first call."""
        if self._recomputed is None:
            self._recomputed = self.run_with_graph(self.ctx.saved_tensors)
        return self._recomputed

    def run_with_graph(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], tuple[Tensor, ...]]:
        """(inputs, results) with a graph of their own: torch picks other kernels where nothing needs a gradient."""
        inputs = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in tensors]
        with torch.enable_grad():
            return inputs, self._function(*inputs)

    def release(self) -> None:
        """The gradient has passed."""
        self._recomputed = None


@dataclass(frozen=True)
class _OuterPacked:
    """What the hooks around a recall made of a tensor."""

    packed: Any
    unpack: Callable[[Any], Tensor]


def _unpack_output(packed: Any) -> Tensor:
    if isinstance(packed, Tensor):
        return packed
    if isinstance(packed, _OuterPacked):
        return packed.unpack(packed.packed)
    cell, i, size, stride, offset = packed
    result: Tensor = cell.recompute()[1][i].detach()
    return result.as_strided(size, stride, offset)


class _CheckpointWithoutOutput(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, recompute_context: _RecomputeContext, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(*tensors)
        ctx.recompute_context, recompute_context.ctx = recompute_context, ctx
        # This graph is gone at once: hooks around need not look at what it keeps.
        with saved_tensors_hooks(Tensor.detach, _unpack_output):
            return tuple(result.detach() for result in recompute_context.run_with_graph(tensors)[1])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        inputs, results = ctx.recompute_context.recompute()
        wanted = [tensor for tensor in inputs if tensor.requires_grad]
        found = iter(torch.autograd.grad(results, wanted, grads, allow_unused=True))
        ctx.recompute_context.release()
        return None, *(next(found) if tensor.requires_grad else None for tensor in inputs)
