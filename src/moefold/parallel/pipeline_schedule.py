"""Schedules of torch.distributed.pipelining for training and evaluation, from the rows of the recipe's schedule."""

from collections.abc import Callable, Sequence

from torch import Tensor
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe
from torch.distributed.pipelining import schedules as torch_schedules
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle

from moefold.comm.pipelining_compat import PipelineStageBase, RowSchedule
from moefold.config.schema import Config
from moefold.topology.pipeline_action import Action, one_per_slot
from moefold.topology.pipeline_layout import StagePlan
from moefold.topology.schedules import runtime_slots, schedule_of

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
"""Classes of torch that run the same rows with one stage per rank, and free each message once it is received: rows keep
what they send until the end of the step (`ScheduleSpec.frees_sent_messages`)."""


def training_schedule(cfg: Config, stages: list[PipelineStageBase], loss_fn: StageLossFn) -> Schedule:
    """Return the recipe's schedule over the stages of this rank."""
    count = cfg.num_micro_batches
    if single_stage := SINGLE_STAGE.get(cfg.parallel.schedule):
        return single_stage(stages[0], count, loss_fn=loss_fn, scale_grads=False)
    schedule = RowSchedule(stages, count, loss_fn=loss_fn, scale_grads=False)
    schedule.set_rows(runtime_slots(cfg))
    return schedule


def evaluation_schedule(
    cfg: Config, stage_plan: StagePlan, stages: list[PipelineStageBase], loss_fn: StageLossFn
) -> Schedule:
    """Return a schedule whose `eval` runs the stages of this rank."""
    if not schedule_of(cfg).splits_backward:
        return training_schedule(cfg, stages, loss_fn)
    return _EvalSchedule(stages, cfg.num_micro_batches, loss_fn, stage_plan.ranks)


class _EvalSchedule(RowSchedule):
    """Forward-only schedule, stage by stage: torch cannot evaluate with split backward passes."""

    def __init__(
        self, stages: list[PipelineStageBase], num_micro_batches: int, loss_fn: StageLossFn, ranks: Sequence[int]
    ) -> None:
        super().__init__(stages, num_micro_batches, loss_fn=loss_fn, scale_grads=False)
        numbers = range(len(ranks))
        rows: list[list[Action]] = [[] for _ in range(stages[0].group_size)]
        for stage, kind in [(i, "F") for i in numbers] + [(i, "B") for i in reversed(numbers)]:
            rows[ranks[stage]] += [Action(stage, kind, i) for i in range(num_micro_batches)]
        # torch validates complete passes before it adds communication; the backward half is removed afterwards.
        self.set_rows(list(map(one_per_slot, rows)))
        self.pipeline_order_with_comms = {
            rank: [action for action in row if action.computation_type in FORWARD_ACTIONS]
            for rank, row in self.pipeline_order_with_comms.items()
        }
