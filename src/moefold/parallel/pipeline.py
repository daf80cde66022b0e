"""Pipeline parallelism: runs the stages of a rank under the schedule of the recipe."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from moefold.comm.groups import ParallelGroups
from moefold.comm.private_torch import run_fsdp_post_backward
from moefold.comm.resumable import Resumable
from moefold.config.chosen import chosen_in
from moefold.config.groups.schedule import SchedulePart
from moefold.config.model import ModelConfig
from moefold.config.sections.parallel import ParallelConfig
from moefold.config.sections.train import TrainConfig
from moefold.model.module_wrapper import set_on_modules
from moefold.model.transformer import Transformer
from moefold.parallel.batch import Batch
from moefold.parallel.fsdp import UnshardedParams, reshard_parameters
from moefold.parallel.pipeline_schedule import MicroBatch, OverlappedPairs, PipelineMessages, PipelineSchedule
from moefold.parallel.pipeline_stage import PipelineStage
from moefold.parallel.tied_embedding import sync_tied_embedding
from moefold.parallel.wgrad_store import WeightGradStore
from moefold.topology.message_plan import forward_rows, plan_messages
from moefold.topology.pipeline_layout import StagePlan
from moefold.topology.schedules import runtime_slots


class PipelineRunner:
    """Runs the stages of this rank under a pipeline schedule."""

    def __init__(
        self,
        stages: list[Transformer],
        stage_plan: StagePlan,
        groups: ParallelGroups,
        model: ModelConfig,
        parallel: ParallelConfig,
        train: TrainConfig,
    ) -> None:
        self._stages = stages
        self._num_loss_terms = len(stages[0].loss_terms)
        self._comm_timer = groups.pp.comm_timer
        zero = parallel.zero
        overlaps = parallel.overlap_experts
        self._unsharded_params = UnshardedParams(stages, zero) if overlaps else None
        self.splits_backward = chosen_in(parallel, SchedulePart).splits_backward
        self._pipeline_stages: list[PipelineStage] = []
        num_stages = len(stage_plan.stages)
        for module, placed in zip(stages, stage_plan.stages_of_rank(groups.pp.rank), strict=True):
            if zero == 2 and isinstance(module, FSDPModule):
                # Gradients are reduced with each micro-batch, but parameters stay gathered until the end of the step.
                module.set_reshard_after_backward(False)
            self._pipeline_stages.append(
                PipelineStage(
                    module,
                    placed.index,
                    num_stages,
                    wgrad_store=self._make_wgrad_store(module, zero),
                    reduces_at_end=zero < 2 and not overlaps,
                    resumable=partial(_forward_resumable, module) if overlaps else None,
                    on_backward_end=self._finish_backward(module),
                )
            )
        layout = groups.layout
        shape = (train.seq_len // (layout.cp * layout.tp), train.micro_batch_size, model.hidden_size)
        self.messages = PipelineMessages(groups.pp.handle, shape, stages[0].dtype, groups.device)
        rows = runtime_slots(model, parallel, train)
        self._count = train.num_micro_batches(parallel.dp)
        self._train_schedule, self._eval_schedule = (
            PipelineSchedule(
                self._pipeline_stages,
                num_stages,
                plan_messages(order, stage_plan.ranks)[groups.pp.rank],
                self.messages,
                comm_timer=self._comm_timer,
                pairs=OverlappedPairs(groups.backward_overlap, groups.recorder) if overlaps else None,
            )
            for order in (rows, forward_rows(rows))
        )

    def _make_wgrad_store(self, module: Transformer, zero: int) -> WeightGradStore | None:
        """Delay the weight gradients of a stage if the schedule splits the backward pass."""
        if not self.splits_backward:
            return None
        has_hooks = self._unsharded_params is None
        store = WeightGradStore(module, reduces_each_micro_batch=zero >= 2, has_hooks=has_hooks)
        set_on_modules(module, "wgrad_store", store)
        return store

    def _finish_backward(self, module: Transformer) -> Callable[[], None] | None:
        """Return the function that accumulates the gradients of unsharded parameters after an unsplit backward pass."""
        if self._unsharded_params is None or self.splits_backward:
            return None
        return partial(run_fsdp_post_backward, module)

    def forward_backward(self, batch: Batch) -> Tensor:
        """Accumulate the gradients of the batch, and return this rank's loss terms, 0 except on the last stage."""
        sync_tied_embedding(self._stages)
        # A schedule waits for other stages whenever it does not run a chunk.
        with self._unsharded_params.step() if self._unsharded_params else nullcontext(), self._comm_timer.waiting():
            self._train_schedule.run(self._split(batch))
        reshard_parameters(self._stages)
        return self._sum_loss_terms(batch)

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> Tensor:
        """Return this rank's loss terms, [terms], without gradients, 0 except on the last stage."""
        sync_tied_embedding(self._stages)
        with self._unsharded_params.unsharded() if self._unsharded_params else nullcontext():
            self._eval_schedule.run(self._split(batch))
        reshard_parameters(self._stages)
        return self._sum_loss_terms(batch)

    def _split(self, batch: Batch) -> list[MicroBatch]:
        """Return the micro-batches of a batch.

        Raises:
            ValueError: the batch is not split into the number of the schedule.
        """
        if batch.num_micro_batches not in (None, self._count):
            raise ValueError(
                f"a batch of {batch.num_micro_batches} micro-batches: the pipeline schedule runs {self._count}"
            )
        return list(batch.micro_batches(self._count))

    def _sum_loss_terms(self, batch: Batch) -> Tensor:
        last = self._pipeline_stages[-1]
        if not last.is_last:
            return batch.columns["weights"].new_zeros(self._num_loss_terms)
        return torch.stack(last.loss_terms).sum(0)


def _forward_resumable(stage: Transformer, x: Tensor, **keywords: Any) -> Resumable[Tensor]:
    """Look the method up when it is called: a memory tracker wraps it."""
    return stage.forward_resumable(x, **keywords)
