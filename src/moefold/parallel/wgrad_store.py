"""Delayed weight gradients of a pipeline stage (zero bubble): stored in backward, computed and reduced in a W pass."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from moefold.comm.private_torch import fsdp_param_groups, run_fsdp_post_backward
from moefold.model.delayed_wgrad import Compute

WeightGradTask = Callable[[], None]


class WeightGradStore:
    """Store of the weight-gradient tasks of one stage, the `wgrad_store` of its `PipelineStage`.

    After each backward pass of a micro-batch the object is called once and returns the weight-gradient pass to run.
    Within a micro-batch the tasks run in the order of the backward pass, on all ranks of the stage.

    Gradients of several backward passes are computed in any type and accumulated in the reduction type.

    Args:
        reduces_each_micro_batch: gradients are reduced over data-parallel ranks with each micro-batch (zero 2 and 3),
            not at the end.
        has_hooks: FSDP's own hooks follow the backward passes of the stage. False with `UnshardedParams`.
    """

    on_backward_end: WeightGradTask | None = None
    """Called when a backward pass has stored all its tasks, before any of them runs."""

    def __init__(self, stage: nn.Module, *, reduces_each_micro_batch: bool, has_hooks: bool = True) -> None:
        self._stage = stage
        self._reduces_each_micro_batch = reduces_each_micro_batch
        self._has_hooks = has_hooks
        self._pending: list[tuple[tuple[Tensor, ...], Compute]] = []
        self._set_gradient_sync(False)

    def put(self, weights: Sequence[Tensor], compute: Compute) -> None:
        """Store a weight-gradient task. See `WeightGradStoreProtocol`."""
        self._pending.append((tuple(weights), compute))

    def __call__(self) -> WeightGradTask:
        """Return the weight-gradient pass of the backward pass that just ended, to run once."""
        tasks = self._pending
        self._pending = []
        if self.on_backward_end is not None:
            self.on_backward_end()
        if not self._has_hooks and isinstance(self._stage, FSDPModule):
            self._set_gradient_sync(False)
            run_fsdp_post_backward(self._stage)

        def run() -> None:
            while tasks:
                weights, compute = tasks.pop(0)
                with torch.no_grad():
                    gradients = compute()
                torch.autograd.backward(weights, gradients)
            self._finish_fsdp_backward()

        return run

    def _finish_fsdp_backward(self) -> None:
        """Let FSDP accumulate the delayed gradients, and reduce them if due."""
        if not isinstance(self._stage, FSDPModule):
            return
        self._set_gradient_sync(True)
        if self._reduces_each_micro_batch:
            _reduce_param_groups(self._stage)
        run_fsdp_post_backward(self._stage)
        self._set_gradient_sync(False)

    def _set_gradient_sync(self, is_enabled: bool) -> None:
        # With zero 0 and 1 the schedule itself decides when gradients are reduced.
        if self._reduces_each_micro_batch and isinstance(self._stage, FSDPModule):
            self._stage.set_requires_gradient_sync(is_enabled)


def _reduce_param_groups(stage: FSDPModule) -> None:
    """Reduce the gradients of a stage, one FSDP parameter group after another.

    Gradients that a backward pass accumulates without reduction are in the reduction type, delayed gradients in the
    type of the weights, and FSDP reduces gradients of one type at a time. Groups follow each other, so that only one
    group has its gradients in high precision.
    """
    for group in fsdp_param_groups(stage):
        for parameter in group.fsdp_params:
            parameter.accumulate_unsharded_grad_if_needed()
            parameter.to_accumulated_grad_if_needed()
        group.post_backward()
