"""Pipeline stage: its passes on one micro-batch at a time, and the tensors kept between them."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.distributed.fsdp import FSDPModule

from moefold.comm.private_torch import fsdp_param_groups, run_fsdp_post_backward
from moefold.comm.resumable import Resumable, ResumableTask, run_to_end
from moefold.parallel.wgrad_store import WeightGradStore, WeightGradTask


class PipelineStage:
    """One stage of a pipeline.

    Between the passes of a micro-batch a stage keeps its input and the root of the graph, but not its output: that is
    freed once it is sent.

    Args:
        num_stages: stages of the pipeline. The output of the last stage are the loss terms, whose sum is minimised.
        wgrad_store: the delayed weight gradients of the module, if the schedule splits the backward pass.
        reduces_at_end: whether the gradients of an FSDP module are reduced once, after the last micro-batch of a step
            (zero 0 and 1). Otherwise FSDP or the caller decides.
        resumable: the resumable forward pass of the module, which replaces the plain forward pass.
        on_backward_end: called after each backward pass.
    """

    def __init__(
        self,
        module: nn.Module,
        index: int,
        num_stages: int,
        *,
        wgrad_store: WeightGradStore | None = None,
        reduces_at_end: bool = False,
        resumable: Callable[..., Resumable[Tensor]] | None = None,
        on_backward_end: Callable[[], None] | None = None,
    ) -> None:
        self.index = index
        self.is_first = index == 0
        self.is_last = index == num_stages - 1
        self.loss_terms: list[Tensor] = []
        """Output of each forward pass of the last stage, detached."""
        self._module = module
        self._wgrad_store = wgrad_store
        self._fsdp_root = module if reduces_at_end and isinstance(module, FSDPModule) else None
        self._resumable = resumable
        self._on_backward_end = on_backward_end
        self._in_flight: dict[int, tuple[Tensor, Tensor | GradientEdge | None]] = {}
        self._weight_passes: dict[int, WeightGradTask] = {}
        self._num_unfinished = 0

    def begin_step(self, num_micro_batches: int) -> None:
        """Prepare for the passes of a step, or of an evaluation."""
        self._num_unfinished = num_micro_batches
        self.loss_terms.clear()
        self._in_flight.clear()
        self._weight_passes.clear()

    def begin_forward(self, x: Tensor, keywords: dict[str, Any]) -> ResumableTask[Tensor]:
        """Start a forward pass that others resume. `finish_forward` gets its input and its output."""
        assert self._resumable is not None
        return ResumableTask(self._resumable(self._track(x), **keywords))

    def finish_forward(self, micro_batch: int, x: Tensor, output: Tensor) -> Tensor | None:
        """Keep the tensors for the backward pass, and return the detached output for the next stage, if any."""
        root: Tensor | GradientEdge | None = None
        if output.requires_grad:
            root = output.sum() if self.is_last else get_gradient_edge(output)
        if torch.is_grad_enabled():
            self._in_flight[micro_batch] = x, root
        if not self.is_last:
            return output.detach()
        self.loss_terms.append(output.detach())
        return None

    def forward(self, micro_batch: int, x: Tensor, keywords: dict[str, Any]) -> Tensor | None:
        """Run a whole forward pass. See `finish_forward`."""
        output: Tensor = (
            self._module(self._track(x), **keywords)
            if self._resumable is None
            else run_to_end(self._resumable(self._track(x), **keywords))
        )
        return self.finish_forward(micro_batch, x, output)

    def backward(self, micro_batch: int, gradient: Tensor | None, *, delays_weights: bool) -> Tensor | None:
        """Run a backward pass, and return the gradient of the input, None on the first stage.

        Args:
            micro_batch: a micro-batch whose forward pass has run.
            gradient: gradient of the output, or None on the last stage.
            delays_weights: whether `backward_weights` computes the delayed weight gradients later.
        """
        x, root = self._in_flight.pop(micro_batch)
        if self._fsdp_root is not None:
            self._fsdp_root.set_is_last_backward(False)
            self._fsdp_root.set_reshard_after_backward(False)
            self._fsdp_root.set_requires_gradient_sync(False)
        if root is not None:
            torch.autograd.backward(root, gradient)
        if self._wgrad_store is not None:
            self._weight_passes[micro_batch] = self._wgrad_store()
        if not delays_weights:
            self.backward_weights(micro_batch)
        if self._on_backward_end is not None:
            self._on_backward_end()
        if self.is_first:
            return None
        # Frozen layers may pass no gradient to the input, but the stage before waits for a gradient.
        return torch.zeros_like(x) if x.grad is None else x.grad

    def backward_weights(self, micro_batch: int) -> None:
        """Compute the rest of a backward pass, and after the last pass of a step reduce the gradients if due."""
        if self._wgrad_store is not None:
            self._weight_passes.pop(micro_batch)()
        self._num_unfinished -= 1
        if self._num_unfinished == 0 and self._fsdp_root is not None:
            self._fsdp_root.set_is_last_backward(True)
            self._fsdp_root.set_reshard_after_backward(True)
            self._fsdp_root.set_requires_gradient_sync(True)
            for group in fsdp_param_groups(self._fsdp_root):
                group.post_backward()
            assert isinstance(self._fsdp_root, nn.Module)
            run_fsdp_post_backward(self._fsdp_root)

    def _track(self, x: Tensor) -> Tensor:
        """Let a received input collect its gradient."""
        return x if self.is_first or not torch.is_grad_enabled() else x.requires_grad_()
