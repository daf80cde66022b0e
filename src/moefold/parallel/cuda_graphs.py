"""CUDA graphs (`run.cuda_graphs`): kernels are recorded once, and replayed without launches by the host.

A graph reads and writes fixed addresses, and repeats the host's decisions at the time of the recording. Here: how
graphs are recorded, and `CapturedPasses`, the forward and the backward pass of a function as two graphs.
`graphed_modules.py` replays modules of a layer, `graphed_micro_batch.py` whole micro-batches.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from moefold.comm.private_torch import foreach_copy_, storage_key

NUM_WARMUP_RUNS = 2
"""Eager runs before a capture: libraries are initialised, and kernels compiled and chosen, at their first use."""

T = TypeVar("T")
TensorFunction = Callable[..., Sequence[Tensor]]
Replay = Callable[[], None]


class GraphRecorder(Protocol):
    """Records graphs that share a memory pool. They must be replayed in the order of their recording."""

    def run(self, function: Callable[[], object]) -> None:
        """Run a function eagerly, on the stream that records graphs."""

    def record(self, function: Callable[[], T]) -> tuple[T, Replay]:
        """Record the launches of a function without executing them.

        Returns:
            The result of the function, whose tensors have values only after a replay, and the replay.
        """


MakeRecorder = Callable[[], GraphRecorder]


class CudaGraphRecorders:
    """Makes recorders of CUDA graphs that share a stream.

    cuBLAS keeps a workspace for each stream that it has run on, of 32 MiB on Hopper, and the allocator keeps freed
    memory for the stream that allocated it.
    """

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None

    def __call__(self) -> "CudaGraphRecorder":
        """Make a recorder with its own memory pool."""
        if self._stream is None:
            self._stream = torch.cuda.Stream()
        return CudaGraphRecorder(self._stream)


class CudaGraphRecorder:
    """`GraphRecorder` of CUDA graphs, with its own memory pool.

    Graphs of different micro-batches must not share a pool. A temporary tensor of the first may have the same address
    as a saved tensor of the second, which is captured later. A pipeline does not replay in the order of capture.
    """

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = stream

    def run(self, function: Callable[[], object]) -> None:
        """See `GraphRecorder`."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            function()
        torch.cuda.current_stream().wait_stream(self._stream)

    def record(self, function: Callable[[], T]) -> tuple[T, Replay]:
        """See `GraphRecorder`."""
        graph = torch.cuda.CUDAGraph()
        # Other threads, such as NCCL's watchdog and a checkpoint's thread, may call CUDA during a capture.
        capture = partial(torch.cuda.graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local")
        with capture(graph):
            result = function()
        return result, graph.replay


class CapturedPasses:
    """Forward and backward pass of a function, captured as two graphs with its input tensors.

    Args:
        function: returns tensors. The tensors that require gradients are differentiated.
        inputs: leaves, some of which require gradients. The graphs read the values that they have at a replay.
    """

    def __init__(self, function: TensorFunction, inputs: Sequence[Tensor], recorder: GraphRecorder) -> None:
        differentiable = [tensor for tensor in inputs if tensor.requires_grad]

        def gradients(outputs: Sequence[Tensor], grads: Sequence[Tensor]) -> Sequence[Tensor | None]:
            return torch.autograd.grad(_with_grad(outputs), differentiable, grads, allow_unused=True)

        def warm_up() -> None:
            outputs = function(*inputs)
            gradients(outputs, [torch.zeros_like(tensor) for tensor in _with_grad(outputs)])

        with torch.enable_grad():
            for _ in range(NUM_WARMUP_RUNS):
                recorder.run(warm_up)
            outputs, self._replay_forward = recorder.record(lambda: function(*inputs))
            grads = [torch.zeros_like(tensor) for tensor in _with_grad(outputs)]
            grads_in, self._replay_backward = recorder.record(lambda: gradients(outputs, grads))
        self.has_grad = tuple(tensor.requires_grad for tensor in outputs)
        """For each output, whether it is differentiable."""
        self._outputs = [tensor.detach() for tensor in outputs]
        self._grads = grads
        self._is_zero = [True for _ in grads]
        remaining = iter(grads_in)
        self._gradients = [next(remaining) if tensor.requires_grad else None for tensor in inputs]

    def static_tensors(self) -> list[Tensor]:
        """Return the tensors at fixed addresses: outputs, their gradients, and the gradients of the inputs."""
        return [*self._outputs, *self._grads, *(gradient for gradient in self._gradients if gradient is not None)]

    def forward(self) -> Sequence[Tensor]:
        """Run on the values that the inputs have now. It returns the same tensors each time."""
        self._replay_forward()
        return self._outputs

    def backward(self, grads: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        """Run for the last forward pass.

        Args:
            grads: gradients of the outputs, None for zero.

        Returns:
            The gradients of the inputs, the same tensors each time, or None for an input that has none.
        """
        present = [grad for grad, has_grad in zip(grads, self.has_grad, strict=True) if has_grad]
        for i, grad in enumerate(present):
            if grad is None and not self._is_zero[i]:
                self._grads[i].zero_()
            self._is_zero[i] = grad is None
        pairs = [(static, grad) for static, grad in zip(self._grads, present, strict=True) if grad is not None]
        foreach_copy_([static for static, _ in pairs], [grad for _, grad in pairs])
        self._replay_backward()
        return self._gradients


def write_inputs(statics: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
    """Copy tensors to fixed addresses, in one launch for each dtype. Tensors that share their storage stay.

    Autograd need not know: the input of graphs in use is not overwritten, and weights keep their values in a step.
    """
    pairs = [(a.data, b) for a, b in zip(statics, tensors, strict=True) if not shares_storage(a, b)]
    for dtype in dict.fromkeys(static.dtype for static, _ in pairs):
        alike = [pair for pair in pairs if pair[0].dtype == dtype]
        foreach_copy_([static for static, _ in alike], [tensor for _, tensor in alike])


def shares_storage(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors have the same storage."""
    return storage_key(a.untyped_storage()) == storage_key(b.untyped_storage())


def _with_grad(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tensor for tensor in tensors if tensor.requires_grad]
