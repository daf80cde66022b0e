"""Attention and routers replayed from CUDA graphs: their shapes do not depend on the routing.

Inputs are copied to the addresses of a graph. The tensors that the forward pass saves and returns stay in its memory
until the backward pass, and the next replay overwrites them. So each micro-batch between its passes needs separate
graphs: `GraphedModule` captures as many as the schedule needs at a time, in the first step, and reuses them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor
from torch.func import functional_call

from moefold.comm.private_torch import TreeSpec, foreach_copy_, tree_flatten, tree_unflatten
from moefold.model.attention import TokenMixer
from moefold.model.local_param import local_param
from moefold.model.module_wrapper import Function, wrap_method
from moefold.model.moe.router import Router
from moefold.model.moe.token_group import TokenPositions
from moefold.model.transformer import Transformer
from moefold.ops.documents import PackedDocuments
from moefold.ops.quantization.weight_cache import WeightCache
from moefold.ops.rope import NoRope, Rope
from moefold.parallel.cuda_graphs import CapturedPasses, MakeRecorder, write_inputs


@dataclass(frozen=True)
class GraphArguments:
    """Arguments of one call of a module, as a graph takes them."""

    tensors: Sequence[Tensor]
    """Tensors whose values change from call to call. They are copied to the addresses of a graph."""
    constant: object
    """The same object in each call: its tensors are part of the graph."""
    rebuild: Callable[..., tuple[Any, ...]]
    """Returns the arguments of the module, with other tensors instead of `tensors`."""


def attention_arguments(x: Tensor, rope: Rope | NoRope, documents: PackedDocuments | None = None) -> GraphArguments:
    """Return the arguments of `TokenMixer.forward`. The cosines and sines belong to the stage."""
    assert documents is None, "validate_cuda_graphs refuses documents"
    return GraphArguments((x,), rope, lambda x: (x, rope))


def router_arguments(x_TH: Tensor, token_positions: TokenPositions) -> GraphArguments:
    """Return the arguments of `Router.forward`. The index of each sample in the global batch changes."""
    assert token_positions.weights_T is None, "validate_cuda_graphs refuses documents, and padding is one"
    tensors = (x_TH, token_positions.sample_ids_B)
    return GraphArguments(
        tensors, token_positions.group, lambda x, sample_ids: (x, replace(token_positions, sample_ids_B=sample_ids))
    )


class GraphedModule:
    """Replayed forward pass of a module. Without gradients, as in evaluation, the module runs eagerly.

    Args:
        arguments: splits the arguments of `forward` into changing and constant arguments.
        weight_cache: cache with the scope of a step. The weights are copied once in a step.
    """

    def __init__(
        self,
        module: nn.Module,
        forward: Function,
        arguments: Callable[..., GraphArguments],
        make_recorder: MakeRecorder,
        weight_cache: WeightCache,
    ) -> None:
        self._module = module
        self._functional = _WithoutHooks(module, forward)
        self._forward = forward
        self._arguments = arguments
        self._make_recorder = make_recorder
        self._weights: dict[str, Tensor] = {}
        self._weight_cache = weight_cache
        self._copied_in: object | None = None
        self._constant: object | None = None
        self._idle: list[_MicroBatchGraphs] = []
        self._outputs: tuple[list[Any], TreeSpec] | None = None

    def __call__(self, *args: Any) -> Any:
        """Compute the output of the module."""
        if not torch.is_grad_enabled():
            return self._forward(*args)
        arguments = self._arguments(*args)
        is_known = self._constant is None or self._constant is arguments.constant
        assert is_known, "graphs hold the positions and the group of their capture"
        self._constant = arguments.constant
        weights = [local_param(parameter) for parameter in self._module.parameters()]
        tensors = iter(_Replay.apply(self, arguments, *arguments.tensors, *weights))
        assert self._outputs is not None
        leaves, spec = self._outputs
        return tree_unflatten([next(tensors) if leaf is _TENSOR else leaf for leaf in leaves], spec)

    def acquire(self, arguments: GraphArguments, weights: Sequence[Tensor]) -> "_MicroBatchGraphs":
        """Return graphs with these inputs that no micro-batch between its passes uses. Capture them if needed."""
        if not self._weights:
            self._weights = self._static_weights(weights)
        graphs = self._idle.pop() if self._idle else self._capture_graphs(arguments)
        shapes = [tensor.shape for tensor in arguments.tensors]
        assert [static.shape for static in graphs.inputs] == shapes, "micro-batches of training have one shape"
        scope = self._weight_cache.scope
        if scope is None or scope is not self._copied_in:
            write_inputs((*graphs.inputs, *self._weights.values()), (*arguments.tensors, *weights))
            self._copied_in = scope
        else:
            write_inputs(graphs.inputs, arguments.tensors)
        return graphs

    def release(self, graphs: "_MicroBatchGraphs") -> None:
        """Return graphs to the pool after their backward pass. The next forward pass may overwrite their tensors."""
        self._idle.append(graphs)

    def static_tensors(self) -> list[Tensor]:
        """Return the tensors at fixed addresses of the graphs that no micro-batch uses, and the copied weights."""
        local = [parameter for parameter in self._module.parameters() if not isinstance(parameter, DTensor)]
        is_copied = len(local) < len(self._weights)
        tensors = list(self._weights.values()) if is_copied else []
        for graphs in self._idle:
            tensors += [*graphs.inputs, *graphs.passes.static_tensors()]
        return tensors

    def _static_weights(self, weights: Sequence[Tensor]) -> dict[str, Tensor]:
        """Return weights at fixed addresses: copies of the weights that FSDP gathers in each step."""
        return {
            name: (weight.clone() if isinstance(parameter, DTensor) else weight).detach().requires_grad_()
            for (name, parameter), weight in zip(self._module.named_parameters(), weights, strict=True)
        }

    def _capture_graphs(self, arguments: GraphArguments) -> "_MicroBatchGraphs":
        names = [f"module.{name}" for name in self._weights]
        statics = [_static(tensor) for tensor in arguments.tensors]

        def run(*tensors: Tensor) -> Sequence[Tensor]:
            weights = dict(zip(names, tensors[len(statics) :], strict=True))
            output = functional_call(self._functional, weights, arguments.rebuild(*tensors[: len(statics)]))
            leaves, spec = tree_flatten(output)
            self._outputs = [_TENSOR if isinstance(leaf, Tensor) else leaf for leaf in leaves], spec
            return [leaf for leaf in leaves if isinstance(leaf, Tensor)]

        passes = CapturedPasses(run, (*statics, *self._weights.values()), self._make_recorder())
        return _MicroBatchGraphs(statics, passes)


_TENSOR = object()
"""Marks the place of a tensor in the output of a module."""


class _WithoutHooks(nn.Module):
    """Calls the forward function of a module without its hooks: FSDP gathers outside of the graph."""

    def __init__(self, module: nn.Module, forward: Function) -> None:
        super().__init__()
        self.module = module
        self._forward = forward

    def forward(self, *args: Any) -> Any:
        return self._forward(*args)


@dataclass(frozen=True)
class _MicroBatchGraphs:
    """Graphs of one micro-batch at a time, with the addresses of its inputs."""

    inputs: Sequence[Tensor]
    passes: CapturedPasses


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, module: GraphedModule, arguments: GraphArguments, *tensors: Tensor) -> tuple[Tensor, ...]:
        graphs = module.acquire(arguments, tensors[len(arguments.tensors) :])
        ctx.module = module
        ctx.graphs = graphs
        ctx.set_materialize_grads(False)
        outputs = [tensor.detach() for tensor in graphs.passes.forward()]
        has_grad = graphs.passes.has_grad
        ctx.mark_non_differentiable(*(y for y, is_needed in zip(outputs, has_grad, strict=True) if not is_needed))
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        graphs: _MicroBatchGraphs = ctx.graphs
        gradients = graphs.passes.backward(grads)
        ctx.module.release(graphs)
        num_inputs = len(graphs.inputs)
        # A parameter may keep the gradient of the first micro-batch as its own, which the next replay would overwrite.
        return None, None, *gradients[:num_inputs], *_clone(gradients[num_inputs:])


def apply_cuda_graphs(
    stage: Transformer,
    weight_cache: WeightCache,
    make_recorder: MakeRecorder,
    *,
    has_router: bool = False,
) -> None:
    """Replay the attention of each layer from graphs. Call it before FSDP, and after the other axes are applied.

    Args:
        weight_cache: the scopes of the steps, inside which no weight changes.
    """
    for module in stage.modules():
        if isinstance(module, TokenMixer):
            arguments: Callable[..., GraphArguments] = attention_arguments
        elif isinstance(module, Router) and has_router:
            arguments = router_arguments
        else:
            continue
        graphed = partial(
            GraphedModule, module, arguments=arguments, make_recorder=make_recorder, weight_cache=weight_cache
        )
        wrap_method(module, "forward", graphed)


def _static(tensor: Tensor) -> Tensor:
    """Return a copy at a fixed address, a leaf that requires a gradient if the tensor does."""
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _clone(tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Copy tensors, in one launch."""
    present = [tensor for tensor in tensors if tensor is not None]
    copies = [torch.empty_like(tensor) for tensor in present]
    foreach_copy_(copies, present)
    remaining = iter(copies)
    return [None if tensor is None else next(remaining) for tensor in tensors]
