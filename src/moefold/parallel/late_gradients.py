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

    Args:
        stage: the module.
        reduces: gradients are reduced over data-parallel ranks with each micro-batch (zero 2 and 3), not at the end.
    """

    left: Run | None = None
    """Called when a backward pass has postponed all that it will, before any of it is computed."""

    def __init__(self, stage: nn.Module, *, reduces: bool) -> None:
        self._stage = stage
        self._reduces = reduces
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
        # It ends a backward pass: for each group of parameters it accumulates in the type of reduction, and reduces.
        # torch calls it in the same way where a schedule reduces gradients.
        fully_shard.state(self._stage)._root_post_backward_final_callback()  # type: ignore[attr-defined]
        self._reduce_with_backward(False)

    def _reduce_with_backward(self, reduces: bool) -> None:
        # With zero 0 and 1 the schedule itself decides when gradients are reduced.
        if self._reduces and isinstance(self._stage, FSDPModule):
            self._stage.set_requires_gradient_sync(reduces)


def postpone_weight_gradients(stage: nn.Module, later: LateGradients) -> None:
    """Give every module of a stage that can compute its weight gradients later the place to leave them."""
    for module in stage.modules():
        if hasattr(module, "later"):
            module.later = later  # type: ignore[assignment]
