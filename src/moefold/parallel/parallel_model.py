"""Model of one rank, sharded along every axis, and the runner of its micro-batches."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TYPE_CHECKING, Protocol

from torch import Tensor, nn

from moefold.comm.collectives import all_reduce_sum
from moefold.comm.groups import ParallelGroups
from moefold.config.groups.dispatcher import DispatcherPart
from moefold.config.model import ModelConfig
from moefold.config.sections.parallel import ParallelConfig
from moefold.config.sections.run import RunConfig
from moefold.config.sections.train import TrainConfig
from moefold.model.local_param import CastCopies
from moefold.model.loss_function import LossFunction
from moefold.model.moe.layer import MoELayer
from moefold.model.transformer import Transformer
from moefold.ops.autotune import Autotuner
from moefold.ops.quantization.weight_cache import WeightCache
from moefold.parallel.accumulation import Accumulation, OverlappedAccumulation
from moefold.parallel.batch import Batch
from moefold.parallel.expert_parallel import check_receive_loads, local_receive_load
from moefold.parallel.fsdp import reshard_parameters
from moefold.parallel.gradients import sum_replicated_gradients
from moefold.topology.pipeline_layout import StagePlan

if TYPE_CHECKING:
    from moefold.offload.activations import ActivationOffload


class StepRunner(Protocol):
    """Runs a batch through the stages of this rank."""

    def forward_backward(self, batch: Batch) -> Tensor:
        """Accumulate gradients, and return this rank's part of the loss terms, [terms]."""

    def evaluate(self, batch: Batch) -> Tensor:
        """Return this rank's part of the loss terms, [terms], without gradients."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ShardedStages:
    """Stages of this rank, sharded along every axis."""

    stages: list[Transformer]
    stage_plan: StagePlan
    """The stages of all ranks."""
    groups: ParallelGroups
    dispatcher: DispatcherPart
    """The dispatcher of the MoE layers, never "auto"."""
    positions: Tensor
    """Sequence positions of this rank, int64 [S/cp]."""
    shards_data_parallel: bool
    """True if data-parallel ranks shard the weights."""
    message: str = ""
    """Log message about the resolved open choices of the recipe, or empty if it left nothing open."""
    offload: "ActivationOffload | None" = None
    """Activation offload between the passes, or None without offload."""
    weight_cache: WeightCache = field(default_factory=WeightCache)
    """Quantised weights of the current step."""
    autotuner: Autotuner = field(default_factory=partial(Autotuner, is_enabled=False))
    """Choices among the kernels by time."""

    @cached_property
    def named_buffers(self) -> dict[str, Tensor]:
        """All buffers of this rank by their names in the full model, not sharded."""
        return {name: buffer for stage in self.stages for name, buffer in stage.named_buffers()}

    def moe_layers(self) -> dict[int, MoELayer]:
        """Return the MoE layers of this rank by their number in the full model."""
        return {number: layer for stage in self.stages for number, layer in stage.moe_layers().items()}


@dataclass(frozen=True, kw_only=True, eq=False)
class ParallelModel(ShardedStages):
    """Sharded stages of this rank with their runner, ready to train."""

    runner: StepRunner
    cast_copies: CastCopies = field(default_factory=CastCopies)
    """Copies of the weights in the compute dtype, without FSDP, which casts the weights that it gathers."""

    @cached_property
    def named_parameters(self) -> dict[str, nn.Parameter]:
        """All parameters of this rank by their names in the full model."""
        parameters: dict[str, nn.Parameter] = {}
        for stage in self.stages:
            for name, parameter in stage.named_parameters():
                # If a rank has both the first and the last stage, the embedding of the first is the parameter, the
                # other a copy.
                parameters.setdefault(name, parameter)
        return parameters

    @property
    def trained_parameters(self) -> dict[str, nn.Parameter]:
        """The trainable parameters of this rank by their names in the full model."""
        return {name: parameter for name, parameter in self.named_parameters.items() if parameter.requires_grad}

    def forward_backward(self, batch: Batch) -> Tensor:
        """Accumulate the gradients of the batch, reduced over every axis. Return this rank's loss terms, [terms]."""
        if self.offload is not None:
            self.offload.begin_step()
        with self.cast_copies.fresh(), self.weight_cache.step():
            loss = self.runner.forward_backward(batch)
        stage = self.stages[0]
        sum_replicated_gradients(self.named_parameters, self.groups.attn.tp)
        if stage.settings.lora.trains_adapters_only:
            sum_replicated_gradients(self.named_parameters, self.groups.moe.etp, "etp")
        if stage.config.last_stage_needs_embedding and not stage.freezes_weights:
            from moefold.parallel.tied_embedding import allreduce_tied_embedding_grad

            allreduce_tied_embedding_grad(self.stages, self.stage_plan, self.groups.pp)
        return loss

    @contextmanager
    def evaluating(self, passes: str, loss: LossFunction | None = None) -> Iterator[None]:
        """Switch to evaluation inside this context, where the weights must not change. It is collective at its end.

        Args:
            passes: description of the passes, for an error.
            loss: loss of the last stage inside this context, with as many terms. None means the loss of the model.

        Raises:
            RunError: a rank had no room for the tokens of its experts, so the results are wrong.
        """
        last = self.stages[-1]
        own_loss = last.loss
        was_training = last.training
        last.loss = own_loss if loss is None else loss
        self.train(False)
        try:
            with self.cast_copies.fresh():
                yield
            # The next pass gathers the weights again, after they have changed.
            reshard_parameters(self.stages)
            loads = self.local_receive_load()
            if loads.numel():
                check_receive_loads(all_reduce_sum(loads, self.groups.world).cpu(), self.dispatcher, passes)
        finally:
            self.train(was_training)
            last.loss = own_loss

    def local_receive_load(self) -> Tensor:
        """Return the receive loads of all passes since the last call. See `expert_parallel.local_receive_load`."""
        dispatchers = (layer.dispatcher for layer in self.moe_layers().values())
        return local_receive_load(dispatchers, self.dispatcher, self.groups)

    @property
    def duplicate_params(self) -> frozenset[str]:
        """Parameters that duplicate a parameter of another pipeline rank: the tied embedding of the last stage."""
        first, last = self.stage_plan.embedding_ranks
        holds_copy = self.stages[0].config.last_stage_needs_embedding and first != last == self.groups.pp.rank
        return frozenset({"embedding.weight"} if holds_copy else ())

    def train(self, mode: bool = True) -> None:
        """Switch between training and evaluation mode."""
        for stage in self.stages:
            stage.train(mode)


def make_runner(
    stages: list[Transformer],
    stage_plan: StagePlan,
    groups: ParallelGroups,
    run: RunConfig,
    model: ModelConfig,
    parallel: ParallelConfig,
    train: TrainConfig,
) -> StepRunner:
    """Make the runner of a mapping: a pipeline, or gradient accumulation, with or without overlapped micro-batches."""
    if groups.layout.pp > 1:
        from moefold.parallel.pipeline import PipelineRunner

        return PipelineRunner(stages, stage_plan, groups, model, parallel, train)
    (stage,) = stages
    count = train.num_micro_batches(parallel.dp)
    if parallel.overlap_experts:
        return OverlappedAccumulation(stage, count, parallel.zero, groups)
    if run.cuda_graphs == "full":
        from moefold.parallel.cuda_graphs import CudaGraphRecorders
        from moefold.parallel.graphed_micro_batch import GraphedAccumulation

        return GraphedAccumulation(stage, count, groups.recorder, CudaGraphRecorders())
    return Accumulation(stage, count, parallel.zero)
