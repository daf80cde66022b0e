"""Steps whose micro-batches are worked on in pairs: the forward pass of one beside the backward pass of another."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining.schedules import (
    FORWARD,
    FULL_BACKWARD,
    OVERLAP_F_B,
    _Action,
    _PipelineScheduleRuntime,
    _wait_batch_p2p,
)
from torch.distributed.pipelining.stage import _PipelineStageBase

from moefold.comm.flight_recorder import FlightRecorder
from moefold.comm.groups import ParallelGroups
from moefold.comm.resumable import BackwardOverlap, ResumableTask, run_to_end
from moefold.model.transformer import Transformer, num_loss_terms
from moefold.parallel.fsdp import UnshardedParams
from moefold.parallel.grad_accumulation import Accumulation, Batch
from moefold.parallel.pipeline_schedule import StageLossFn
from moefold.topology.schedule_tables import ForwardBackward, ScheduleItem, ScheduleItemRow


class OverlappedAccumulation(Accumulation):
    """Runs the whole model on two micro-batches at a time: the next one forward, the last one backward."""

    def __init__(self, model: Transformer, num_micro_batches: int, zero: int, groups: ParallelGroups) -> None:
        super().__init__(model, num_micro_batches, zero)
        model.enable_comm_yields()
        self._unsharded_params = UnshardedParams([model], zero)
        self._backward_overlap = groups.backward_overlap
        self._recorder = groups.recorder

    def forward_backward(self, batch: Batch) -> Tensor:
        """See `Accumulation`."""
        total = batch.weights.new_zeros(num_loss_terms(self._model.cfg.model))
        loss: Tensor | None = None
        with self._unsharded_params.step():
            for i, (tokens, targets) in enumerate(self._micro_batches(batch)):
                begun = ResumableTask(self._model.forward_resumable(tokens, **targets))
                if loss is None:
                    self._recorder.set_phase("forward of micro-batch 0")
                else:
                    self._recorder.set_phase(f"backward of micro-batch {i - 1} beside the forward of {i}")
                    with self._backward_overlap.backward(begun):
                        loss.sum().backward()
                    self._unsharded_params.finish_backward(self._model)
                loss = begun.run_to_end()
                total += loss.detach()
            assert loss is not None
            self._recorder.set_phase("backward of the last micro-batch")
            loss.sum().backward()
            self._unsharded_params.finish_backward(self._model)
        return total

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> Tensor:
        """See `Accumulation`."""
        self._recorder.set_phase("evaluation")
        with self._unsharded_params.unsharded():
            return super().evaluate(batch)


class ResumableStage(nn.Module):
    """A pipeline stage whose forward pass may have begun before it is called for.

    Its stage is no sub-module: torch's schedules would free the parameters of FSDP modules that they find.
    """

    def __init__(self, stage: Transformer, recorder: FlightRecorder) -> None:
        super().__init__()
        stage.enable_comm_yields()
        self._forward_resumable = lambda *args, **targets: stage.forward_resumable(*args, **targets)
        self._is_training = lambda: stage.training
        self._recorder = recorder
        self._forward_task: ResumableTask[Tensor] | None = None

    def begin_forward(self, x: Tensor, **targets: Tensor) -> ResumableTask[Tensor]:
        """A forward pass that the next call of `forward` will finish."""
        assert self._forward_task is None, "one forward pass of a stage at a time"
        self._forward_task = ResumableTask(self._forward_resumable(x, **targets))
        return self._forward_task

    def forward(self, x: Tensor, **targets: Tensor) -> Tensor:
        """As the stage."""
        begun = self._forward_task
        self._forward_task = None
        if begun is not None:
            return begun.run_to_end()
        self._recorder.set_phase("forward of a micro-batch" if self._is_training() else "evaluation")
        return run_to_end(self._forward_resumable(x, **targets))


class OverlappedSchedule(_PipelineScheduleRuntime):
    """A pipeline schedule with pairs.

    Args:
        stages: of this rank; their modules are `ResumableStage`s.
        num_micro_batches: of a step.
        loss_fn: of the last stage.
        rows: the work of each pipeline rank.
        backward_overlap: what takes steps of a forward pass during a backward pass.
        recorder: is told of the pairs.
    """

    def __init__(
        self,
        stages: list[_PipelineStageBase],
        num_micro_batches: int,
        loss_fn: StageLossFn,
        rows: Sequence[ScheduleItemRow],
        *,
        backward_overlap: BackwardOverlap,
        recorder: FlightRecorder,
    ) -> None:
        super().__init__(stages, num_micro_batches, loss_fn=loss_fn, scale_grads=False)
        self._backward_overlap = backward_overlap
        self._recorder = recorder
        self._local_stages = {stage.stage_index: stage for stage in stages}
        self._prepare_schedule_with_comms(
            {rank: [_to_torch_action(work) for work in row] for rank, row in enumerate(rows)}
        )
        self.register_custom_function(OVERLAP_F_B, self._run_forward_backward)

    def _run_forward_backward(self, action: _Action, ctx: Any) -> None:
        """What torch does for the one action and the other, with the forward pass begun before the backward pass."""
        assert action.sub_actions is not None
        (ahead, forward), (behind, backward) = self._wait_inputs(*action.sub_actions)
        args = ctx.arg_mbs[forward]
        kwargs = ctx.kwarg_mbs[forward]
        inputs = args if ahead.is_first else ahead._retrieve_recv_activations(forward)
        assert isinstance(ahead.submod, ResumableStage)
        self._recorder.set_phase(
            f"backward of micro-batch {backward} in stage {behind.stage_index} beside the forward of {forward} in "
            f"stage {ahead.stage_index}"
        )
        self.backward_counter[behind.stage_index] += 1
        with self._backward_overlap.backward(ahead.submod.begin_forward(*inputs, **kwargs)):
            behind.backward_one_chunk(backward, loss=self._maybe_get_loss(behind, backward))
        if behind.stage_index - 1 in self._local_stages:
            self._local_stages[behind.stage_index - 1].set_local_bwd_input(
                behind.get_local_bwd_output(backward), backward
            )
        output = ahead.forward_one_chunk(forward, args, kwargs, save_forward_output=False)
        self._maybe_compute_loss(ahead, output, ctx.target_mbs, forward)
        if ahead.stage_index + 1 in self._local_stages:
            self._local_stages[ahead.stage_index + 1].set_local_fwd_input(output, forward)

    def _wait_inputs(self, forward: _Action, backward: _Action) -> list[tuple[_PipelineStageBase, int]]:
        """Stage and micro-batch of both passes, once their inputs have arrived."""
        found = []
        for action, receiving in ((forward, self.fwd_recv_ops), (backward, self.bwd_recv_ops)):
            stage = self._local_stages[action.stage_index]
            micro_batch = action.microbatch_index
            assert micro_batch is not None
            # Nothing is received from a stage of this rank.
            _wait_batch_p2p(receiving.pop((stage.stage_index, micro_batch), []))
            found.append((stage, micro_batch))
        return found


def _to_torch_action(work: ScheduleItem) -> _Action:
    if not isinstance(work, ForwardBackward):
        return _Action.from_str(str(work))
    passes = ((work.forward, FORWARD), (work.backward, FULL_BACKWARD))
    return _Action(-1, OVERLAP_F_B, None, tuple(_Action(a.stage, kind, a.micro_batch) for a, kind in passes))
