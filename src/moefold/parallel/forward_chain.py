"""Forward passes through the stages of all pipeline ranks, one after another, without gradients."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from moefold.comm.collectives import broadcast, isend, recv
from moefold.comm.groups import ParallelGroups
from moefold.model.transformer import Transformer
from moefold.topology.pipeline_layout import StagePlan


class ForwardChain:
    """Stages of this rank in the chain of all stages; hidden states are sent point to point between pipeline ranks.

    Args:
        stages: stages of this rank, in model order.
        stage_plan: the stages of all ranks.
        groups: the process groups of its mapping.
    """

    fetches_experts = False
    """True if ranks read each other's experts from shared memory."""

    def __init__(self, stages: Sequence[Transformer], stage_plan: StagePlan, groups: ParallelGroups) -> None:
        self.stages = list(stages)
        self.groups = groups
        self._owners = stage_plan.ranks
        self._pending_sends: list[tuple[dist.Work, Tensor]] = []

    @property
    def last_stage(self) -> Transformer | None:
        """The last stage of the model, if this rank has it."""
        return self.stages[-1] if self.stages[-1].is_last else None

    @property
    def dtype(self) -> torch.dtype:
        """Compute dtype."""
        return self.stages[0].dtype

    @torch.no_grad()
    def forward(self, tokens: Tensor, num_local_tokens: int, token_weights: Tensor | None = None) -> Tensor | None:
        """Run one batch; collective over all ranks. Each data-parallel rank has its own batch.

        Args:
            tokens: int64 [B, S]; on a rank without the first stage only its shape matters.
            num_local_tokens: tokens per sample on this rank between the sub-layers.
            token_weights: 0 for padding, which is not routed, otherwise above 0, [B, S/cp]; None without padding.

        Returns:
            The logits of the last stage, [tokens that its head keeps, B, V/tp]; None on other ranks.
        """
        pp = self.groups.pp
        shape = (num_local_tokens, tokens.shape[0], self.stages[0].config.hidden_size)
        x = tokens
        stages = iter(self.stages)
        columns = {} if token_weights is None else {"token_weights": token_weights}
        for number, owner in enumerate(self._owners):
            if owner != pp.rank:
                continue
            if number and self._owners[number - 1] != pp.rank:
                x = recv(torch.empty(shape, dtype=self.dtype, device=self.groups.device), pp, self._owners[number - 1])
            x = next(stages)(x, **columns)
            if number + 1 == len(self._owners):
                return x
            if self._owners[number + 1] != pp.rank:
                x = x.contiguous()
                self.wait_send()
                work = isend(x, pp, self._owners[number + 1])
                if work is not None:
                    self._pending_sends.append((work, x))
        return None

    def wait_send(self) -> None:
        """Wait until the next stages have received the last activations."""
        for work, _ in self._pending_sends:
            work.wait()
        self._pending_sends.clear()

    def broadcast_from_last_stage(self, x: Tensor) -> Tensor:
        """Broadcast a tensor from the last stage to the ranks of the same attention coordinates; collective over pp.

        Args:
            x: the tensor to send; elsewhere a tensor of the same shape and dtype.
        """
        return broadcast(x, self.groups.pp, self._owners[-1])
