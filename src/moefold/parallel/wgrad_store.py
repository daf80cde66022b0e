"""The weight gradients of a stage that a schedule computes apart from those of the input: kept, computed, reduced."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard

from moefold.model.delayed_wgrad import Compute

WeightGradTask = Callable[[], None]


class WeightGradStore:
    """What the backward pass of one stage has postponed; also what `PipelineStage` knows as a `dw_builder`.

    Each backward pass of a micro-batch is followed by one call of this object, which gives what is to be run for it.
    Within a micro-batch the order is that of the backward pass, on all ranks of the stage.

    Gradients of several backward passes are added up in the type of reduction, whatever type they are computed in.

    Args:
        stage: the module.
        reduces: gradients are reduced over data-parallel ranks with each micro-batch (zero 2 and 3), not at the end.
        has_hooks: FSDP follows the backward passes of the stage by itself; not so with `UnshardedParams`.
    """

    on_backward_end: WeightGradTask | None = None
    """Called when a backward pass has postponed all that it will, before any of it is computed."""

    def __init__(self, stage: nn.Module, *, reduces_each_micro_batch: bool, has_hooks: bool = True) -> None:
        self._stage = stage
        self._reduces_each_micro_batch = reduces_each_micro_batch
        self._has_hooks = has_hooks
        self._pending: list[tuple[tuple[Tensor, ...], Compute]] = []
        self._set_gradient_sync(False)

    def put(self, weights: Sequence[Tensor], compute: Compute) -> None:
        """See `WeightGradStoreProtocol`."""
        self._pending.append((tuple(weights), compute))

    def __call__(self) -> WeightGradTask:
        """What the backward pass that just ended has postponed, to be run once."""
        postponed = self._pending
        self._pending = []
        if self.on_backward_end is not None:
            self.on_backward_end()
        if not self._has_hooks and isinstance(self._stage, FSDPModule):
            self._set_gradient_sync(False)
            _run_fsdp_post_backward(self._stage)

        def run() -> None:
            while postponed:
                weights, compute = postponed.pop(0)
                with torch.no_grad():
                    gradients = compute()
                torch.autograd.backward(weights, gradients)
            self._finish_fsdp_backward()

        return run

    def _finish_fsdp_backward(self) -> None:
        """Let FSDP take up gradients that came behind its backward pass, and reduce them if it is time."""
        if not isinstance(self._stage, FSDPModule):
            return
        self._set_gradient_sync(True)
        if self._reduces_each_micro_batch:
            _reduce_param_groups(self._stage)
        _run_fsdp_post_backward(self._stage)
        self._set_gradient_sync(False)

    def _set_gradient_sync(self, is_enabled: bool) -> None:
        # With zero 0 and 1 the schedule itself decides when gradients are reduced.
        if self._reduces_each_micro_batch and isinstance(self._stage, FSDPModule):
            self._stage.set_requires_gradient_sync(is_enabled)


def _run_fsdp_post_backward(stage: FSDPModule) -> None:
    """Let FSDP end a backward pass: each group of parameters accumulates in the type of reduction, or reduces."""
    # torch calls it in the same way where a schedule reduces gradients.
    fully_shard.state(stage)._root_post_backward_final_callback()  # type: ignore[attr-defined]


def _reduce_param_groups(stage: FSDPModule) -> None:
    """Reduce the gradients of a stage, one group of parameters after another.

    Those that came with a backward pass without reduction are in the type of reduction already, and postponed ones in
    the type of the weights. FSDP reduces gradients of one type at once. Group by group, so that no more than one group
    has its gradients in the wide type.
    """
    for state in fully_shard.state(stage)._state_ctx.all_states:  # type: ignore[attr-defined]
        group = state._fsdp_param_group
        if group is not None:
            for parameter in group.fsdp_params:
                parameter.accumulate_unsharded_grad_if_needed()
                parameter.to_accumulated_grad_if_needed()
            group.post_backward()


def install_wgrad_store(stage: nn.Module, wgrad_store: WeightGradStore) -> None:
    """Give every module of a stage that can compute its weight gradients later the place to leave them."""
    for module in stage.modules():
        if hasattr(module, "wgrad_store"):
            module.wgrad_store = wgrad_store  # type: ignore[assignment]
