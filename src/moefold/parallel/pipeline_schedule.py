"""Schedules of torch.distributed.pipelining for training and evaluation."""

from collections.abc import Callable, Sequence

from torch import Tensor
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.distributed.pipelining import schedules as torch_schedules
from torch.distributed.pipelining.schedules import (
    PipelineScheduleMulti,
    PipelineScheduleSingle,
)

from moefold.comm.pipelining_compat import PipelineAction, PipelineStageBase, RowSchedule
from moefold.config.schema import Config
from moefold.topology.pipeline_layout import StagePlan
from moefold.topology.schedule_csv import read_schedule
from moefold.topology.schedule_tables import SCHEDULES

Schedule = PipelineScheduleSingle | PipelineScheduleMulti
StageLossFn = Callable[[Tensor, Tensor], Tensor]
FORWARD_ACTIONS = (
    torch_schedules.FORWARD,
    torch_schedules.SEND_F,
    torch_schedules.RECV_F,
    torch_schedules.UNSHARD,
    torch_schedules.RESHARD,
)
SINGLE_STAGE = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}
MULTI_STAGE = {
    "interleaved": ScheduleInterleaved1F1B,
    "zero-bubble": torch_schedules.ScheduleInterleavedZeroBubble,
    "zbv": torch_schedules.ScheduleZBVZeroBubble,
    "dualpipev": torch_schedules.ScheduleDualPipeV,
}


def training_schedule(cfg: Config, stages: list[PipelineStageBase], loss_fn: StageLossFn) -> Schedule:
    """Return the recipe's schedule over the stages of this rank."""
    p = cfg.parallel
    count = cfg.num_micro_batches
    if p.schedule in SINGLE_STAGE:
        return SINGLE_STAGE[p.schedule](stages[0], count, loss_fn=loss_fn, scale_grads=False)
    if p.schedule in MULTI_STAGE:
        return MULTI_STAGE[p.schedule](stages, count, loss_fn=loss_fn, scale_grads=False)
    read = read_schedule(p.schedule_csv, p.pp, p.virtual_stages, count)
    schedule = RowSchedule(stages, count, loss_fn=loss_fn, scale_grads=False)
    schedule.set_rows(
        {rank: [PipelineAction.from_str(str(action)) for action in row] for rank, row in enumerate(read.rows)}
    )
    return schedule


def evaluation_schedule(
    cfg: Config, stage_plan: StagePlan, stages: list[PipelineStageBase], loss_fn: StageLossFn
) -> Schedule:
    """Return a schedule whose `eval` runs the stages of this rank."""
    if not SCHEDULES[cfg.parallel.schedule].splits_backward:
        return training_schedule(cfg, stages, loss_fn)
    return _EvalSchedule(stages, cfg.num_micro_batches, loss_fn, stage_plan.ranks)


class _EvalSchedule(RowSchedule):
    """Forward-only schedule, stage by stage: torch's split-backward schedules cannot evaluate."""

    def __init__(
        self, stages: list[PipelineStageBase], num_micro_batches: int, loss_fn: StageLossFn, ranks: Sequence[int]
    ) -> None:
        super().__init__(stages, num_micro_batches, loss_fn=loss_fn, scale_grads=False)
        numbers = range(len(ranks))
        passes = [f"{stage}F" for stage in numbers] + [f"{stage}B" for stage in reversed(numbers)]
        actions: dict[int, list[PipelineAction | None]] = {rank: [] for rank in range(stages[0].group_size)}
        for name in passes:
            actions[ranks[int(name[:-1])]] += [PipelineAction.from_str(f"{name}{i}") for i in range(num_micro_batches)]
        # torch validates complete passes before it adds communication; the backward half is removed afterwards.
        self.set_rows(actions)
        self.pipeline_order_with_comms = {
            rank: [action for action in row if action.computation_type in FORWARD_ACTIONS]
            for rank, row in self.pipeline_order_with_comms.items()
        }
