"""CUDA graphs of attention (`run.cuda_graphs`): its passes are replayed without launches by the host.

A graph reads and writes fixed addresses. Inputs are copied to them; what the forward pass saves and returns stays in
them until the backward pass, and the next replay overwrites it. So each micro-batch between its passes has graphs of
its own: `GraphedModule` captures as many as the schedule needs at a time, in the first step, and reuses them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor
from torch.func import functional_call

from moefold.comm.torch_compat import foreach_copy_
from moefold.model.attention import SelfAttention
from moefold.model.local_param import local_param
from moefold.model.module_wrapper import Function, wrap_method
from moefold.model.transformer import Transformer
from moefold.ops.documents import PackedDocuments
from moefold.ops.quantization.weight_cache import WeightCache
from moefold.ops.rope import Rope

NUM_WARMUP_RUNS = 2
"""Eager runs before a capture: libraries are initialised, and kernels compiled and chosen, at their first use."""

TensorFunction = Callable[..., Tensor]


class CapturedPasses(Protocol):
    """Forward and backward pass of a function, captured with its input tensors."""

    def forward(self) -> Tensor:
        """Run on the values that the inputs have now; returns the same tensor each time."""
        ...

    def backward(self, grad: Tensor) -> Sequence[Tensor]:
        """Run for the last forward pass; returns the gradients of the inputs, the same tensors each time."""
        ...


Capture = Callable[[TensorFunction, Sequence[Tensor]], CapturedPasses]
"""Captures a function with its inputs, which are leaves that require gradients."""


class CudaGraphPasses:
    """`CapturedPasses` as two CUDA graphs with a memory pool of their own.

    Graphs that shared a pool could overwrite what another one saved: a temporary of the first may lie where the second,
    captured later, saves, and a pipeline does not replay in the order of capture.
    """

    def __init__(self, function: TensorFunction, inputs: Sequence[Tensor]) -> None:
        pool = torch.cuda.graph_pool_handle()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream), torch.enable_grad():
            for _ in range(NUM_WARMUP_RUNS):
                output = function(*inputs)
                torch.autograd.grad(output, inputs, torch.zeros_like(output))
        torch.cuda.current_stream().wait_stream(stream)
        self._forward = torch.cuda.CUDAGraph()
        self._backward = torch.cuda.CUDAGraph()
        # Other threads, such as NCCL's watchdog and that of a checkpoint, may call CUDA during a capture.
        capture = partial(torch.cuda.graph, pool=pool, stream=stream, capture_error_mode="thread_local")
        with torch.enable_grad():
            with capture(self._forward):
                output = function(*inputs)
            self._grad = torch.zeros_like(output)
            with capture(self._backward):
                self._gradients = torch.autograd.grad(output, inputs, self._grad)
        self._output = output.detach()

    def forward(self) -> Tensor:
        """See `CapturedPasses`."""
        self._forward.replay()
        return self._output

    def backward(self, grad: Tensor) -> Sequence[Tensor]:
        """See `CapturedPasses`."""
        self._grad.copy_(grad)
        self._backward.replay()
        return self._gradients


class GraphedModule:
    """Forward of an attention module, replayed; without gradients, as in evaluation, it runs as it is.

    Args:
        module: the module, whose parameters may be DTensors of FSDP.
        forward: its forward function.
        capture: captures it.
        weight_cache: its scope is a step, in which the weights are copied once.
    """

    def __init__(self, module: nn.Module, forward: Function, capture: Capture, weight_cache: WeightCache) -> None:
        self._module = module
        self._forward = forward
        self._capture = capture
        self._rope: Rope | None = None
        self._weights: dict[str, Tensor] = {}
        self._weight_cache = weight_cache
        self._copied_in: object | None = None
        self._idle: list[_MicroBatchGraphs] = []
        self._is_capturing = False

    def __call__(self, x: Tensor, rope: Rope, documents: PackedDocuments | None = None) -> Tensor:
        """Compute attention, as `SelfAttention.forward`."""
        if self._is_capturing or not torch.is_grad_enabled():
            y: Tensor = self._forward(x, rope, documents)
            return y
        assert documents is None, "validate_cuda_graphs refuses documents"
        assert self._rope is None or self._rope is rope, "the positions of a rank do not change"
        self._rope = rope
        weights = [local_param(parameter) for parameter in self._module.parameters()]
        replayed: Tensor = _Replay.apply(self, x, *weights)
        return replayed

    def acquire(self, x: Tensor, weights: Sequence[Tensor]) -> "_MicroBatchGraphs":
        """Return graphs that no micro-batch between its passes uses, with these inputs; captures them if needed."""
        if not self._weights:
            self._weights = self._static_weights(weights)
        graphs = self._idle.pop() if self._idle else self._capture_graphs(x)
        assert graphs.x.shape == x.shape, "micro-batches of training have one shape"
        scope = self._weight_cache.scope
        if scope is None or scope is not self._copied_in:
            _write((graphs.x, *self._weights.values()), (x, *weights))
            self._copied_in = scope
        else:
            _write((graphs.x,), (x,))
        return graphs

    def release(self, graphs: "_MicroBatchGraphs") -> None:
        """Return graphs after their backward pass; the next forward pass may overwrite what they hold."""
        self._idle.append(graphs)

    def _static_weights(self, weights: Sequence[Tensor]) -> dict[str, Tensor]:
        """Return weights at fixed addresses: copies of those that FSDP gathers in each step."""
        return {
            name: _leaf(weight.clone() if isinstance(parameter, DTensor) else weight)
            for (name, parameter), weight in zip(self._module.named_parameters(), weights, strict=True)
        }

    def _capture_graphs(self, x: Tensor) -> "_MicroBatchGraphs":
        names = list(self._weights)

        def run(x: Tensor, *weights: Tensor) -> Tensor:
            self._is_capturing = True
            try:
                y: Tensor = functional_call(self._module, dict(zip(names, weights, strict=True)), (x, self._rope))
            finally:
                self._is_capturing = False
            return y

        static_x = _leaf(x.clone())
        return _MicroBatchGraphs(static_x, self._capture(run, (static_x, *self._weights.values())))


@dataclass(frozen=True)
class _MicroBatchGraphs:
    """Graphs of one micro-batch at a time, with the address of its input."""

    x: Tensor
    passes: CapturedPasses


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, module: GraphedModule, x: Tensor, *weights: Tensor) -> Tensor:
        graphs = module.acquire(x, weights)
        ctx.module = module
        ctx.graphs = graphs
        return graphs.passes.forward().detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grad_x, *grad_weights = ctx.graphs.passes.backward(grad)
        ctx.module.release(ctx.graphs)
        # A parameter may keep the gradient of the first micro-batch as its own, which the next replay would overwrite.
        return None, grad_x, *_clone(grad_weights)


def apply_cuda_graphs(stage: Transformer, weight_cache: WeightCache, capture: Capture = CudaGraphPasses) -> None:
    """Replay the attention of each layer from graphs; call it before FSDP, and after the other axes are applied.

    Args:
        stage: whose layers are changed.
        weight_cache: the scopes of the steps, inside which no weight changes.
        capture: captures the passes of a module.
    """
    for module in stage.modules():
        if isinstance(module, SelfAttention):
            graphed = partial(GraphedModule, module, capture=capture, weight_cache=weight_cache)
            wrap_method(module, "forward", graphed)


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_()


def _write(statics: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
    """Copy tensors to fixed addresses, in one launch, except those that lie there.

    Autograd need not know: the input of graphs in use is not overwritten, and weights keep their values in a step.
    """
    pairs = [(a.data, b) for a, b in zip(statics, tensors, strict=True) if a.data_ptr() != b.data_ptr()]
    foreach_copy_([static for static, _ in pairs], [tensor for _, tensor in pairs])


def _clone(tensors: list[Tensor]) -> list[Tensor]:
    """Copy tensors, in one launch."""
    copies = [torch.empty_like(tensor) for tensor in tensors]
    foreach_copy_(copies, tensors)
    return copies
