"""Parameters that stay gathered for a whole step, for stages that work on two micro-batches at a time.

FSDP hooks into modules, and follows one micro-batch through each: forward, then backward. With the forward pass of one
and the backward pass of another in a stage, it would take them for the same. So here it has no hooks: parameters are
gathered when a step begins, and what FSDP does behind a backward pass is called behind each.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard


class UnshardedParams:
    """Those of the stages of a rank, under zero 0 to 2.

    Args:
        stages: FSDP modules; they lose their hooks.
        zero: with 2, gradients are reduced with each micro-batch, else at the end of a step.
    """

    def __init__(self, stages: Sequence[nn.Module], zero: int) -> None:
        self._stages = stages
        self._reduces_each_micro_batch = zero == 2
        for part in self._fsdp_modules():
            state = fully_shard.state(part)  # type: ignore[attr-defined]
            state._pre_forward_hook_handle.remove()
            state._post_forward_hook_handle.remove()

    @contextmanager
    def unsharded(self) -> Iterator[None]:
        """Inside, the stages can compute. Collective over the data-parallel ranks, like all here."""
        for stage in self._stages:
            # Parts must learn from the stage who they are before they do anything.
            fully_shard.state(stage)._lazy_init()  # type: ignore[attr-defined]
        for part in self._fsdp_modules():
            part.unshard()
        yield
        for part in self._fsdp_modules():
            part.reshard()

    @contextmanager
    def step(self) -> Iterator[None]:
        """Inside, micro-batches go forward and backward; behind it their gradients are reduced."""
        with self.unsharded():
            for part in self._fsdp_modules():
                part.set_reshard_after_backward(False, recurse=False)
                part.set_requires_gradient_sync(self._reduces_each_micro_batch, recurse=False)
            yield
            if not self._reduces_each_micro_batch:
                for part in self._fsdp_modules():
                    part.set_requires_gradient_sync(True, recurse=False)
                for stage in self._stages:
                    self.finish_backward(stage)

    def finish_backward(self, stage: nn.Module) -> None:
        """A backward pass of a stage is over: its gradients are added up in the type of reduction, or reduced."""
        # torch calls it in the same way where a pipeline schedule reduces gradients.
        fully_shard.state(stage)._root_post_backward_final_callback()  # type: ignore[attr-defined]

    def _fsdp_modules(self) -> Iterator[FSDPModule]:
        for stage in self._stages:
            for part in stage.modules():
                if isinstance(part, FSDPModule):
                    yield part
