"""Activation checkpointing: recompute a part of a layer in the backward pass, or only its output.

`checkpoint_wrapper` saves the inputs of a function and recomputes everything inside. Its output is still saved by the
next operation, so a cheap function with a large output, such as a norm, would gain nothing. `checkpoint_without_output`
(Megatron's term) drops that output: the backward pass recomputes it when the next operation first needs it.
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from moefold.comm.private_torch import innermost_saved_tensor_hooks
from moefold.comm.resumable import Resumable
from moefold.model.module_wrapper import CallContext, Function, as_resumable, wrap_calls

TensorFunction = Callable[..., tuple[Tensor, ...]]


class OutputCheckpoint(Protocol):
    """Policy that saves the outputs of a function for backward or recomputes them."""

    def __call__(self, function: TensorFunction, *tensors: Tensor) -> AbstractContextManager[tuple[Tensor, ...]]:
        """Provide function(*tensors) to the operations inside the context.

        Args:
            function: takes only these tensors, which include the weights that it uses, and does not communicate.
        """


@contextmanager
def no_checkpoint(function: TensorFunction, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Provide the outputs without recomputation."""
    yield function(*tensors)


@contextmanager
def checkpoint_without_output(function: TensorFunction, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Discard the outputs. Recompute them once, when the first consumer's backward needs them."""
    if not torch.is_grad_enabled() or not any(tensor.requires_grad for tensor in tensors):
        yield function(*tensors)
        return
    context = _RecomputeContext(function)
    outputs = _CheckpointWithoutOutput.apply(context, *tensors)
    with saved_tensors_hooks(context.make_pack_hook(outputs), _unpack_output):
        yield outputs


def checkpoint_wrapper(function: Function) -> Function:
    """Wrap a function so that it saves only its arguments, and is recomputed in the backward pass.

    Its collectives are repeated: every rank of their groups recomputes at the same place.
    """

    def run(*args: Any, **kwargs: Any) -> Any:
        # There is no RNG state to preserve: jitter is a hash of the step and the token's position.
        return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

    return run


def checkpoint_resumable(function: Function, on_yield: Callable[[], None]) -> Function:
    """Wrap a function, plain or resumable, like `checkpoint_wrapper`. The recomputation runs to its end.

    torch's checkpoint stops at the last saved tensor, which may come before a collective on one rank and after it on
    another. Its saved-tensor hooks would also catch operations that run between the yields.

    Args:
        function: its tensors are positional arguments.
        on_yield: called at each yield of the recomputation.
    """

    def begin(*args: Any) -> CallContext | None:
        if not torch.is_grad_enabled():
            return None
        resumable_checkpoint = _ResumableCheckpoint(function, args, on_yield)
        return CallContext(lambda: saved_tensors_hooks(resumable_checkpoint.pack, _unpack_resumable))

    return wrap_calls(function, begin)


class _ResumableCheckpoint:
    """Recomputation of the tensors that one call of a function would have saved."""

    def __init__(self, function: Function, args: Sequence[Any], on_yield: Callable[[], None]) -> None:
        self._function = function
        self._on_yield = on_yield
        self._non_tensor_args = [None if isinstance(arg, Tensor) else arg for arg in args]
        self._tensor_indices = [i for i, arg in enumerate(args) if isinstance(arg, Tensor)]
        self._requires_grad = [args[i].requires_grad for i in self._tensor_indices]
        self._num_saved = 0
        self._recomputed: dict[int, Tensor] = {}
        self._saved_inputs: Tensor = _SaveInputs.apply(
            torch.empty(0, requires_grad=True), *(args[i] for i in self._tensor_indices)
        )

    def pack(self, tensor: Tensor) -> "tuple[_ResumableCheckpoint, int]":
        """Pack hook: replace the tensor by its number."""
        self._num_saved += 1
        return self, self._num_saved - 1

    def unpack(self, number: int) -> Tensor:
        """Return the tensor of that number, only once."""
        if number not in self._recomputed:
            self._recompute()
        return self._recomputed.pop(number)

    def _recompute(self) -> None:
        args = list(self._non_tensor_args)
        node: Any = self._saved_inputs.grad_fn
        for i, tensor, requires_grad in zip(self._tensor_indices, node.saved_tensors, self._requires_grad, strict=True):
            args[i] = tensor.detach().requires_grad_(requires_grad)
        recomputed: dict[int, Tensor] = {}

        def pack(tensor: Tensor) -> None:
            recomputed[len(recomputed)] = tensor.detach()

        with torch.enable_grad():
            # Run to the end even if nothing more is saved: all ranks must stop at the same place.
            steps = as_resumable(self._function, *args)
            while not _advance(steps, pack):
                self._on_yield()
        assert len(recomputed) == self._num_saved, "the recomputation must save as many tensors as the forward pass"
        self._recomputed = recomputed


def _advance(resumable: Resumable[Tensor], pack: Callable[[Tensor], None]) -> bool:
    """Run one step and pack its saved tensors with `pack`, and return True if no step was left."""
    with saved_tensors_hooks(pack, _refuse_unpack):
        return next(resumable, _END) is _END


_END = object()


def _unpack_resumable(packed: tuple[_ResumableCheckpoint, int]) -> Tensor:
    resumable_checkpoint, number = packed
    return resumable_checkpoint.unpack(number)


def _refuse_unpack(packed: None) -> Tensor:
    raise AssertionError("recomputed tensors must not be unpacked")


class _SaveInputs(torch.autograd.Function):
    """Save arguments with save_for_backward, so that enclosing saved-tensor hooks apply to them."""

    @staticmethod
    def forward(ctx: Any, node: Tensor, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return node.clone()


class _RecomputeContext:
    """Recomputation of one call's outputs, which are cached while the backward pass needs them."""

    def __init__(self, function: TensorFunction) -> None:
        self._function = function
        # Weak: a cycle would keep the graph, and with it a received message, until Python looks for garbage.
        self.ctx: Callable[[], Any] = lambda: None
        self._recomputed: tuple[list[Tensor], tuple[Tensor, ...]] | None = None

    def make_pack_hook(self, results: tuple[Tensor, ...]) -> Callable[[Tensor], Any]:
        """Return a pack hook that replaces tensors sharing the storage of the outputs."""
        # Do not capture the outputs: the hook outlives the context.
        output_indices = {(result.untyped_storage().data_ptr(), result.dtype): i for i, result in enumerate(results)}
        # torch calls the innermost hooks only: pass all other tensors to the enclosing hooks.
        outer = innermost_saved_tensor_hooks()

        def pack(tensor: Tensor) -> Any:
            i = output_indices.get((tensor.untyped_storage().data_ptr(), tensor.dtype)) if tensor.numel() else None
            if i is not None:
                return self, i, tensor.size(), tensor.stride(), tensor.storage_offset()
            # Detached: an operation that saves its own result, and has no backward pass, would keep itself in memory.
            return tensor.detach() if outer is None else _OuterPacked(outer[0](tensor), outer[1])

        return pack

    def recompute(self) -> tuple[list[Tensor], tuple[Tensor, ...]]:
        """Return (inputs, outputs) connected by a graph. Computed on the first call."""
        if self._recomputed is None:
            self._recomputed = self.run_with_graph(self.ctx().saved_tensors)
        return self._recomputed

    def run_with_graph(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], tuple[Tensor, ...]]:
        """Return (inputs, outputs) with their own graph: torch may choose other kernels without a graph."""
        inputs = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in tensors]
        with torch.enable_grad():
            return inputs, self._function(*inputs)

    def release(self) -> None:
        """Release the recomputed outputs after the backward pass."""
        self._recomputed = None


@dataclass(frozen=True)
class _OuterPacked:
    """Tensor packed by the saved-tensor hooks that enclose this checkpoint."""

    packed: Any
    unpack: Callable[[Any], Tensor]


def _unpack_output(packed: Any) -> Tensor:
    if isinstance(packed, Tensor):
        return packed
    if isinstance(packed, _OuterPacked):
        return packed.unpack(packed.packed)
    context, i, size, stride, offset = packed
    result: Tensor = context.recompute()[1][i].detach()
    return result.as_strided(size, stride, offset)


class _CheckpointWithoutOutput(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, recompute_context: _RecomputeContext, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(*tensors)
        ctx.recompute_context = recompute_context
        recompute_context.ctx = weakref.ref(ctx)
        # This graph is discarded immediately: bypass the enclosing hooks.
        with saved_tensors_hooks(Tensor.detach, _unpack_output):
            return tuple(result.detach() for result in recompute_context.run_with_graph(tensors)[1])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        inputs, results = ctx.recompute_context.recompute()
        differentiable = [tensor for tensor in inputs if tensor.requires_grad]
        gradients = iter(torch.autograd.grad(results, differentiable, grads, allow_unused=True))
        ctx.recompute_context.release()
        return None, *(next(gradients) if tensor.requires_grad else None for tensor in inputs)
