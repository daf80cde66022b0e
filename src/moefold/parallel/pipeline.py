"""Pipeline parallelism through torch.distributed.pipelining: the cut into stages, the schedule, tied embeddings."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle
from torch.distributed.pipelining.stage import _PipelineStageBase
from torch.distributed.tensor import DTensor

from moefold.config.schema import Config
from moefold.model.transformer import Transformer, loss_terms
from moefold.parallel.accumulate import Batch
from moefold.parallel.groups import Group, ParallelGroups
from moefold.parallel.wait_clock import WaitClock


def stage_layers(num_layers: int, num_stages: int) -> list[range]:
    """Consecutive layers of each stage, as even as possible; the first stages take what is left over."""
    base, extra = divmod(num_layers, num_stages)
    bounds = [0]
    for stage in range(num_stages):
        bounds.append(bounds[-1] + base + (stage < extra))
    return [range(a, b) for a, b in zip(bounds, bounds[1:], strict=False)]


def stage_numbers(pp: int, pp_rank: int, virtual_stages: int) -> list[int]:
    """The stages of one pipeline rank: pp_rank, pp_rank + pp, ... (arXiv:2104.04473)."""
    return [pp_rank + i * pp for i in range(virtual_stages)]


class Pipeline:
    """Runs the stages of this rank under a schedule."""

    def __init__(self, stages: list[Transformer], groups: ParallelGroups, cfg: Config) -> None:
        self._is_last = stages[-1].is_last
        self._is_first = stages[0].is_first
        self._modules = stages
        self._zero = cfg.parallel.zero
        self._clock = groups.pp.clock
        layout = groups.layout
        numbers = stage_numbers(layout.pp, groups.pp.rank, cfg.parallel.virtual_stages)
        shape = (
            cfg.train.seq_len // (layout.cp * layout.tp),
            cfg.train.micro_batch_size,
            cfg.model.hidden_size,
        )
        hidden = torch.empty(shape, dtype=stages[0].dtype, device="meta", requires_grad=True)
        tokens = torch.empty(
            (cfg.train.micro_batch_size, cfg.train.seq_len // layout.cp), dtype=torch.int64, device="meta"
        )
        self._num_terms = loss_terms(cfg.model)
        loss = torch.empty(self._num_terms, dtype=_loss_dtype(stages[0].dtype), device="meta", requires_grad=True)
        for module in stages:
            if self._zero == 2 and isinstance(module, FSDPModule):
                # Gradients are reduced with each micro-batch, but parameters stay until the step is through.
                module.set_reshard_after_backward(False)
        num_stages = layout.pp * cfg.parallel.virtual_stages

        def build() -> list[_PipelineStageBase]:
            return [
                _TimedStage(
                    groups.pp.clock,
                    _OwnReduction(module) if self._zero >= 2 else module,
                    number,
                    num_stages,
                    groups.device,
                    input_args=(tokens if module.is_first else hidden,),
                    output_args=(loss if module.is_last else hidden,),
                    group=groups.pp.handle,
                )
                for number, module in zip(numbers, stages, strict=True)
            ]

        # Each schedule has stages of its own: torch 2.11 decides once, when a schedule first runs, whether what its
        # stages receive needs gradients. An evaluation on the stages of training would switch them off for good.
        self._terms: list[Tensor] = []
        self._schedule = _schedule(cfg.parallel.schedule, build(), cfg.num_micro_batches, self._total)
        self._evaluation = _schedule(cfg.parallel.schedule, build(), cfg.num_micro_batches, self._total)

    def forward_backward(self, batch: Batch) -> Tensor:
        """Add the gradients of the batch to the parameters; returns the terms of my loss, 0 off the last stage."""
        self._terms.clear()
        # The schedule waits for other stages wherever it is not in a chunk of its own.
        with self._clock.waiting():
            self._schedule.step(*self._inputs(batch), target=batch.labels, return_outputs=False, **batch.targets())
        for module in self._modules:
            for part in module.modules():
                if isinstance(part, FSDPModule):
                    part.reshard()
        return self._sum(batch)

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> Tensor:
        """The terms of the loss of my tokens, [terms], without gradients; 0 off the last stage."""
        self._terms.clear()
        self._evaluation.eval(*self._inputs(batch), target=batch.labels, **batch.targets())
        return self._sum(batch)

    def _inputs(self, batch: Batch) -> tuple[Tensor, ...]:
        return (batch.tokens,) if self._is_first else ()

    def _sum(self, batch: Batch) -> Tensor:
        if not self._is_last:
            return batch.weights.new_zeros(self._num_terms)
        return torch.stack(self._terms).sum(0)

    def _total(self, output: Tensor, target: Tensor) -> Tensor:
        """The last stage has computed its terms already: keep them, and give the schedule their sum to minimise."""
        self._terms.append(output.detach())
        return output.sum()


def share_embedding_gradient(stages: list[Transformer], pp: Group) -> None:
    """Add the gradients of the two copies of an embedding that the first and the last pipeline rank hold."""
    if pp.size == 1 or pp.rank not in (0, pp.size - 1):
        return
    copies = [stage.embedding.weight.grad for stage in stages if hasattr(stage, "embedding")]
    (grad,) = copies
    assert isinstance(grad, DTensor)
    mine = grad.to_local()
    theirs = torch.empty_like(mine)
    peer = pp.ranks[pp.size - 1 - pp.rank]
    operations = [
        dist.P2POp(dist.isend, mine, peer, pp.handle),
        dist.P2POp(dist.irecv, theirs, peer, pp.handle),
    ]
    with pp.clock.waiting():
        for work in dist.batch_isend_irecv(operations):
            work.wait()
    mine += theirs


class _TimedStage(PipelineStage):
    """A stage whose own work is told from the waiting around it."""

    def __init__(self, clock: WaitClock, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._clock = clock

    def forward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        with self._clock.working():
            return super().forward_one_chunk(*args, **kwargs)

    def backward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        with self._clock.working():
            return super().backward_one_chunk(*args, **kwargs)


class _OwnReduction(nn.Module):
    """Hides that a stage is an FSDP module, so that FSDP and not the schedule decides when gradients are reduced."""

    def __init__(self, stage: nn.Module) -> None:
        super().__init__()
        self.stage = stage

    def forward(self, x: Tensor, **targets: Tensor) -> Tensor:
        return self.stage(x, **targets)


def _schedule(
    name: str, stages: list[_PipelineStageBase], num_micro_batches: int, loss_fn: Callable[[Tensor, Tensor], Tensor]
) -> PipelineScheduleSingle | PipelineScheduleMulti:
    if name == "interleaved":
        return ScheduleInterleaved1F1B(stages, num_micro_batches, loss_fn=loss_fn, scale_grads=False)
    kind = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}[name]
    return kind(stages[0], num_micro_batches, loss_fn=loss_fn, scale_grads=False)


def _loss_dtype(compute: torch.dtype) -> torch.dtype:
    return torch.float64 if compute == torch.float64 else torch.float32
