"""The weight gradients of a stage that a schedule computes apart from those of the input: kept, computed, reduced."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard

from moefold.model.later import Compute

Run = Callable[[], None]


class LateGradients:
    """What the backward pass of one stage has postponed; also what `PipelineStage` knows as a `dw_builder`.

    Each backward pass of a micro-batch is followed by one call of this object, which gives what is to be run for it.
    Within a micro-batch the order is that of the backward pass, on all ranks of the stage.

    Gradients of several backward passes are added up in the type of reduction, whatever type they are computed in.

    Args:
        stage: the module.
        reduces: gradients are reduced over data-parallel ranks with each micro-batch (zero 2 and 3), not at the end.
        has_hooks: FSDP follows the backward passes of the stage by itself; not so with `HeldParameters`.
    """

    left: Run | None = None
    """Called when a backward pass has postponed all that it will, before any of it is computed."""

    def __init__(self, stage: nn.Module, *, reduces: bool, has_hooks: bool = True) -> None:
        self._stage = stage
        self._reduces = reduces
        self._has_hooks = has_hooks
        self._postponed: list[tuple[tuple[Tensor, ...], Compute]] = []
        self._reduce_with_backward(False)

    def postpone(self, weights: Sequence[Tensor], compute: Compute) -> None:
        """See `Later`."""
        self._postponed.append((tuple(weights), compute))

    def __call__(self) -> Run:
        """What the backward pass that just ended has postponed, to be run once."""
        postponed, self._postponed = self._postponed, []
        if self.left is not None:
            self.left()
        if not self._has_hooks and isinstance(self._stage, FSDPModule):
            self._reduce_with_backward(False)
            _end_backward(self._stage)

        def run() -> None:
            while postponed:
                weights, compute = postponed.pop(0)
                with torch.no_grad():
                    gradients = compute()
                torch.autograd.backward(weights, gradients)
            self._settle()

        return run

    def _settle(self) -> None:
        """Let FSDP take up gradients that came behind its backward pass, and reduce them if it is time."""
        if not isinstance(self._stage, FSDPModule):
            return
        self._reduce_with_backward(True)
        if self._reduces:
            _reduce_in_one_type(self._stage)
        _end_backward(self._stage)
        self._reduce_with_backward(False)

    def _reduce_with_backward(self, reduces: bool) -> None:
        # With zero 0 and 1 the schedule itself decides when gradients are reduced.
        if self._reduces and isinstance(self._stage, FSDPModule):
            self._stage.set_requires_gradient_sync(reduces)


def _end_backward(stage: FSDPModule) -> None:
    """Let FSDP end a backward pass: each group of parameters accumulates in the type of reduction, or reduces."""
    # torch calls it in the same way where a schedule reduces gradients.
    fully_shard.state(stage)._root_post_backward_final_callback()  # type: ignore[attr-defined]


def _reduce_in_one_type(stage: FSDPModule) -> None:
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


def postpone_weight_gradients(stage: nn.Module, later: LateGradients) -> None:
    """Give every module of a stage that can compute its weight gradients later the place to leave them."""
    for module in stage.modules():
        if hasattr(module, "later"):
            module.later = later  # type: ignore[assignment]
