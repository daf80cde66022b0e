"""Overlapped micro-batches: the forward pass of one runs concurrently with the backward pass of another (DualPipe)."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining.schedules import OVERLAP_F_B

from moefold.comm.flight_recorder import FlightRecorder
from moefold.comm.groups import ParallelGroups
from moefold.comm.pipelining_compat import (
    PipelineAction,
    PipelineStageBase,
    RowSchedule,
    received_activations,
    wait_p2p,
)
from moefold.comm.resumable import BackwardOverlap, ResumableTask, run_to_end
from moefold.model.transformer import Transformer
from moefold.parallel.batch import Batch, select_bounds
from moefold.parallel.fsdp import UnshardedParams
from moefold.parallel.gradients import Accumulation
from moefold.parallel.pipeline_schedule import StageLossFn
from moefold.topology.pipeline_action import SlotRow


class OverlappedAccumulation(Accumulation):
    """Gradient accumulation on two micro-batches at a time: the next one's forward, the last one's backward."""

    def __init__(self, model: Transformer, num_micro_batches: int, zero: int, groups: ParallelGroups) -> None:
        super().__init__(model, num_micro_batches, zero)
        self._unsharded_params = UnshardedParams([model], zero)
        self._backward_overlap = groups.backward_overlap
        self._recorder = groups.recorder

    def forward_backward(self, batch: Batch) -> Tensor:
        """See base class."""
        total = self._zero_terms(batch)
        loss: Tensor | None = None
        with self._unsharded_params.step():
            for i, (tokens, keywords) in enumerate(batch.micro_batches(self._count(batch))):
                task = ResumableTask(self._model.forward_resumable(tokens, **keywords))
                if loss is None:
                    self._recorder.set_phase("forward of micro-batch 0")
                else:
                    self._recorder.set_phase(f"backward of micro-batch {i - 1} overlapped with the forward of {i}")
                    with self._backward_overlap.backward(task):
                        loss.sum().backward()
                    self._unsharded_params.finish_backward(self._model)
                loss = task.run_to_end()
                total += loss.detach()
            assert loss is not None
            self._recorder.set_phase("backward of the last micro-batch")
            loss.sum().backward()
            self._unsharded_params.finish_backward(self._model)
        return total

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> Tensor:
        """See base class."""
        self._recorder.set_phase("evaluation")
        total = self._zero_terms(batch)
        with self._unsharded_params.unsharded():
            for tokens, keywords in batch.micro_batches(self._count(batch)):
                # Not by a call of the model: the hooks of FSDP would shard the parameters.
                total += run_to_end(self._model.forward_resumable(tokens, **keywords))
        return total


class ResumableStage(nn.Module):
    """Pipeline stage whose forward pass may already have started when the schedule calls it.

    The stage is not registered as a sub-module: torch's schedules would reshard FSDP modules that they find.
    """

    def __init__(self, stage: Transformer, recorder: FlightRecorder) -> None:
        super().__init__()
        self._forward_resumable = lambda *args, **keywords: stage.forward_resumable(*args, **keywords)
        self._is_training = lambda: stage.training
        self._recorder = recorder
        self._forward_task: ResumableTask[Tensor] | None = None

    def begin_forward(self, x: Tensor, **keywords: Any) -> ResumableTask[Tensor]:
        """Start a forward pass that the next call of `forward` finishes."""
        assert self._forward_task is None, "one forward pass of a stage at a time"
        self._forward_task = ResumableTask(self._forward_resumable(x, **keywords))
        return self._forward_task

    def forward(self, x: Tensor, **keywords: Any) -> Tensor:
        """Finish the started forward pass, or run a whole one."""
        task = self._forward_task
        self._forward_task = None
        if task is not None:
            return task.run_to_end()
        self._recorder.set_phase("forward of a micro-batch" if self._is_training() else "evaluation")
        return run_to_end(self._forward_resumable(x, **keywords))


class OverlappedSchedule(RowSchedule):
    """Pipeline schedule with overlapped forward-backward pairs.

    Args:
        stages: the stages of this rank, whose modules are `ResumableStage`s.
        num_micro_batches: micro-batches of a step.
        loss_fn: loss of the last stage.
        rows: the slots of each pipeline rank.
        backward_overlap: resumes the forward pass during a backward pass.
        recorder: flight recorder for the phases.
    """

    def __init__(
        self,
        stages: list[PipelineStageBase],
        num_micro_batches: int,
        loss_fn: StageLossFn,
        rows: Sequence[SlotRow],
        *,
        backward_overlap: BackwardOverlap,
        recorder: FlightRecorder,
    ) -> None:
        super().__init__(stages, num_micro_batches, loss_fn=loss_fn, scale_grads=False)
        self._backward_overlap = backward_overlap
        self._recorder = recorder
        self._local_stages = {stage.stage_index: stage for stage in stages}
        self.set_rows(rows)
        self.register_custom_function(OVERLAP_F_B, self._run_forward_backward)

    def _run_forward_backward(self, action: PipelineAction, ctx: Any) -> None:
        """Run torch's forward and backward actions as a pair; the forward pass starts before the backward pass."""
        assert action.sub_actions is not None
        (fwd_stage, forward), (bwd_stage, backward) = self._wait_inputs(*action.sub_actions)
        args = ctx.arg_mbs[forward]
        kwargs = ctx.kwarg_mbs[forward]
        inputs = args if fwd_stage.is_first else received_activations(fwd_stage, forward)
        assert isinstance(fwd_stage.submod, ResumableStage)
        self._recorder.set_phase(
            f"backward of micro-batch {backward} in stage {bwd_stage.stage_index} overlapped with the forward of "
            f"{forward} in stage {fwd_stage.stage_index}"
        )
        self.backward_counter[bwd_stage.stage_index] += 1
        with self._backward_overlap.backward(fwd_stage.submod.begin_forward(*inputs, **select_bounds(kwargs, forward))):
            bwd_stage.backward_one_chunk(backward, loss=self.loss_of(bwd_stage, backward))
        if bwd_stage.stage_index - 1 in self._local_stages:
            self._local_stages[bwd_stage.stage_index - 1].set_local_bwd_input(
                bwd_stage.get_local_bwd_output(backward), backward
            )
        output = fwd_stage.forward_one_chunk(forward, args, kwargs, save_forward_output=False)
        self.compute_loss(fwd_stage, output, ctx.target_mbs, forward)
        if fwd_stage.stage_index + 1 in self._local_stages:
            self._local_stages[fwd_stage.stage_index + 1].set_local_fwd_input(output, forward)

    def _wait_inputs(self, forward: PipelineAction, backward: PipelineAction) -> list[tuple[PipelineStageBase, int]]:
        """Wait for the inputs of both passes; return stage and micro-batch of each."""
        found = []
        for action, receiving in ((forward, self.fwd_recv_ops), (backward, self.bwd_recv_ops)):
            stage = self._local_stages[action.stage_index]
            micro_batch = action.microbatch_index
            assert micro_batch is not None
            # Nothing is received from a stage of the same rank.
            wait_p2p(receiving.pop((stage.stage_index, micro_batch), []))
            found.append((stage, micro_batch))
        return found
