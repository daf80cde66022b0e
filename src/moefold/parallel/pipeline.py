"""Pipeline parallelism through torch.distributed.pipelining: stages and schedules."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from moefold.comm.comm_timer import CommTimer
from moefold.comm.flight_recorder import FlightRecorder
from moefold.comm.groups import ParallelGroups
from moefold.comm.pipelining_compat import PipelineStageBase, PipelineStageWithoutSelfSends
from moefold.config.schema import Config
from moefold.model.module_wrapper import set_on_modules
from moefold.model.transformer import Transformer
from moefold.parallel.batch import Batch, select_bounds
from moefold.parallel.fsdp import UnshardedParams
from moefold.parallel.overlapped_schedule import OverlappedSchedule, ResumableStage
from moefold.parallel.pipeline_schedule import Schedule, evaluation_schedule, training_schedule
from moefold.parallel.tied_embedding import sync_tied_embedding
from moefold.parallel.wgrad_store import WeightGradStore
from moefold.topology.pipeline_layout import StagePlan
from moefold.topology.schedules import runtime_slots, schedule_of


class PipelineRunner:
    """Runs the stages of this rank under a pipeline schedule.

    Args:
        stages: the stages of this rank, in model order.
        stage_plan: the stages of all ranks.
        groups: the communicators.
        cfg: the recipe.
    """

    def __init__(self, stages: list[Transformer], stage_plan: StagePlan, groups: ParallelGroups, cfg: Config) -> None:
        self._is_last = stages[-1].is_last
        self._is_first = stages[0].is_first
        self._stages = stages
        self._num_loss_terms = len(stages[0].loss_terms)
        self._loss_terms: list[Tensor] = []
        zero = cfg.parallel.zero
        self._comm_timer = groups.pp.comm_timer
        layout = groups.layout
        shape = (cfg.train.seq_len // (layout.cp * layout.tp), cfg.train.micro_batch_size, cfg.model.hidden_size)
        hidden = torch.empty(shape, dtype=stages[0].dtype, device="meta", requires_grad=True)
        tokens = torch.empty(
            (cfg.train.micro_batch_size, cfg.train.seq_len // layout.cp), dtype=torch.int64, device="meta"
        )
        loss = torch.empty(self._num_loss_terms, dtype=_loss_dtype(stages[0].dtype), device="meta", requires_grad=True)
        wgrad_stores: list[WeightGradStore | None] = [None] * len(stages)
        self._unsharded_params = UnshardedParams(stages, zero) if cfg.parallel.overlap_experts else None
        for i, module in enumerate(stages):
            if zero == 2 and isinstance(module, FSDPModule):
                # Gradients are reduced with each micro-batch, but parameters stay gathered until the end of the step.
                module.set_reshard_after_backward(False)
            if schedule_of(cfg).splits_backward:
                wgrad_stores[i] = wgrad_store = WeightGradStore(
                    module, reduces_each_micro_batch=zero >= 2, has_hooks=self._unsharded_params is None
                )
                set_on_modules(module, "wgrad_store", wgrad_store)

        def build() -> list[PipelineStageBase]:
            return [
                _TimedStage(
                    groups.pp.comm_timer,
                    None
                    if self._unsharded_params is None or wgrad_store is not None
                    else partial(self._unsharded_params.finish_backward, module),
                    self._stage_module(module, zero, groups.recorder),
                    stage.number,
                    len(stage_plan.stages),
                    groups.device,
                    input_args=(tokens if module.is_first else hidden,),
                    output_args=(loss if module.is_last else hidden,),
                    group=groups.pp.handle,
                    dw_builder=wgrad_store,
                )
                for stage, module, wgrad_store in zip(
                    stage_plan.of_rank(groups.pp.rank), stages, wgrad_stores, strict=True
                )
            ]

        # Each schedule needs its own stages: torch 2.11 decides once, when a schedule first runs, whether the inputs
        # received by its stages require gradients. An evaluation on the training stages would disable them permanently.
        self._train_schedule: Schedule
        if self._unsharded_params is None:
            self._train_schedule = training_schedule(cfg, build(), self._loss_fn)
        else:
            count = cfg.num_micro_batches
            rows = runtime_slots(cfg)
            backward_overlap = groups.backward_overlap
            recorder = groups.recorder
            self._train_schedule = OverlappedSchedule(
                build(), count, self._loss_fn, rows, backward_overlap=backward_overlap, recorder=recorder
            )
        self._eval_schedule = evaluation_schedule(cfg, stage_plan, build(), self._loss_fn)

    def forward_backward(self, batch: Batch) -> Tensor:
        """Accumulate the gradients of the batch; return this rank's loss terms, 0 except on the last stage."""
        self._loss_terms.clear()
        sync_tied_embedding(self._stages)
        # A schedule waits for other stages whenever it does not run a chunk.
        with self._unsharded_params.step() if self._unsharded_params else nullcontext(), self._comm_timer.waiting():
            self._train_schedule.step(
                *self._inputs(batch), target=batch.columns["labels"], return_outputs=False, **batch.keywords()
            )
        for module in self._stages:
            for submodule in module.modules():
                if isinstance(submodule, FSDPModule):
                    submodule.reshard()
        return self._sum_loss_terms(batch)

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> Tensor:
        """Return this rank's loss terms, [terms], without gradients; 0 except on the last stage."""
        self._loss_terms.clear()
        sync_tied_embedding(self._stages)
        with self._unsharded_params.unsharded() if self._unsharded_params else nullcontext():
            self._eval_schedule.eval(*self._inputs(batch), target=batch.columns["labels"], **batch.keywords())
        return self._sum_loss_terms(batch)

    def _stage_module(self, module: Transformer, zero: int, recorder: FlightRecorder) -> nn.Module:
        """Wrap a stage in the module that the schedule calls."""
        if self._unsharded_params is not None:
            return ResumableStage(module, recorder)
        return _HideFSDP(module) if zero >= 2 else module

    def _inputs(self, batch: Batch) -> tuple[Tensor, ...]:
        return (batch.tokens,) if self._is_first else ()

    def _sum_loss_terms(self, batch: Batch) -> Tensor:
        if not self._is_last:
            return batch.columns["weights"].new_zeros(self._num_loss_terms)
        return torch.stack(self._loss_terms).sum(0)

    def _loss_fn(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the loss to minimise: the sum of the loss terms that the last stage computed, which are recorded."""
        self._loss_terms.append(output.detach())
        return output.sum()


class _TimedStage(PipelineStageWithoutSelfSends):
    """Pipeline stage that counts its own compute time as working.

    It does not set up P2P communication with itself: gloo cannot, and nothing would be sent. `on_backward_end`, if any,
    is called after each backward pass.
    """

    def __init__(
        self, comm_timer: CommTimer, on_backward_end: Callable[[], None] | None, *args: Any, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self._comm_timer = comm_timer
        self._on_backward_end = on_backward_end

    def forward_one_chunk(
        self,
        fwd_chunk_id: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None = None,
        save_forward_output: bool = True,
    ) -> Any:
        kwargs = select_bounds(kwargs or {}, fwd_chunk_id)
        with self._comm_timer.working():
            return super().forward_one_chunk(fwd_chunk_id, args, kwargs, save_forward_output)

    def backward_one_chunk(self, *args: Any, **kwargs: Any) -> None:
        with self._comm_timer.working():
            super().backward_one_chunk(*args, **kwargs)
            if self._on_backward_end is not None:
                self._on_backward_end()

    def backward_weight_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        with self._comm_timer.working():
            return super().backward_weight_one_chunk(*args, **kwargs)


class _HideFSDP(nn.Module):
    """Hides from the schedule that a stage is an FSDP module, so that FSDP decides when gradients are reduced."""

    def __init__(self, stage: nn.Module) -> None:
        super().__init__()
        self.stage = stage

    def forward(self, x: Tensor, **keywords: Any) -> Tensor:
        return self.stage(x, **keywords)


def _loss_dtype(compute: torch.dtype) -> torch.dtype:
    return torch.float64 if compute == torch.float64 else torch.float32
