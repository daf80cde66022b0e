"""The private names of torch.distributed.pipelining that the package uses; checked on torch 2.11, 2.12 and 2.13.

See `comm/torch_compat.py`, which has all others.
"""

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import OVERLAP_F_B, _PipelineScheduleRuntime
from torch.distributed.pipelining.schedules import _Action as PipelineAction
from torch.distributed.pipelining.schedules import _wait_batch_p2p as wait_p2p
from torch.distributed.pipelining.stage import _PipelineStageBase as PipelineStageBase

from moefold.topology.pipeline_action import Slot, SlotRow

__all__ = ["PipelineAction", "PipelineStageBase", "PipelineStageWithoutSelfSends", "RowSchedule", "wait_p2p"]


class RowSchedule(_PipelineScheduleRuntime):
    """Pipeline schedule defined by the slots of every rank; torch adds the sends and receives."""

    def set_rows(self, rows: Sequence[SlotRow]) -> None:
        """Set the slots of every pipeline rank, in order; the passes of a pair are one action of torch."""
        self._prepare_schedule_with_comms({rank: list(map(_to_torch_action, row)) for rank, row in enumerate(rows)})

    def loss_of(self, stage: PipelineStageBase, micro_batch: int) -> Any:
        """Return the loss of a micro-batch on the last stage; None on others."""
        return self._maybe_get_loss(stage, micro_batch)

    def compute_loss(self, stage: PipelineStageBase, output: Any, targets: Any, micro_batch: int) -> None:
        """Compute and keep the loss of a micro-batch if the stage is the last."""
        self._maybe_compute_loss(stage, output, targets, micro_batch)


def _to_torch_action(slot: Slot) -> PipelineAction:
    actions = tuple(PipelineAction.from_str(str(action)) for action in slot)
    return actions[0] if len(actions) == 1 else PipelineAction(-1, OVERLAP_F_B, None, actions)


class PipelineStageWithoutSelfSends(PipelineStage):
    """Pipeline stage that opens no connection from a rank to itself, as neighbours on one rank would."""

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        return [op for op in super()._get_init_p2p_neighbors_ops() if op.group_peer != self.group_rank]


def received_activations(stage: PipelineStageBase, micro_batch: int) -> tuple[Tensor, ...]:
    """Return the inputs of a micro-batch that a stage has received."""
    return stage._retrieve_recv_activations(micro_batch)
