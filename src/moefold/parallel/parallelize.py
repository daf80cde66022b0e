"""Apply all parallel axes to the model, in reading order; the only place that does."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from moefold.comm.flight_recorder import FlightRecorder
from moefold.comm.groups import Group, ParallelGroups
from moefold.config.model import ModelConfig
from moefold.config.schema import Config
from moefold.cost.stages import plan_stages
from moefold.model.attention import Attention, CausalAttention
from moefold.model.init import init_weights
from moefold.model.mla import LatentAttention
from moefold.model.mlp import SwiGLU
from moefold.model.moe.dispatch import Dispatcher, ShardedMicroBatch, make_dispatcher
from moefold.model.moe.dispatch.deepep import open_buffer
from moefold.model.moe.dispatch.least_loaded import RebalanceRule
from moefold.model.moe.dispatch.registry import select_dispatcher
from moefold.model.moe.dispatch.validating import ValidatingDispatcher
from moefold.model.moe.layer import MoELayer
from moefold.model.norm import FullWidthQKNorm, RMSNorm
from moefold.model.transformer import Embedding, Head, MTPBlock, Transformer
from moefold.offload.activations import ActivationOffload
from moefold.parallel.context_parallel import context_parallel_attention, sequence_positions
from moefold.parallel.fsdp import master_weight_dtype, shard_data_parallel, shard_model_parallel
from moefold.parallel.gradients import Accumulation, Batch, sum_replicated_gradients
from moefold.parallel.offload import apply_offload, open_offload
from moefold.parallel.overlapped_schedule import OverlappedAccumulation
from moefold.parallel.pipeline import PipelineRunner, allreduce_tied_embedding_grad
from moefold.parallel.recompute import apply_recompute, device_memory, resolve_recompute
from moefold.parallel.select_ops import SelectedKernels, select_kernels
from moefold.parallel.tensor_parallel import (
    AsyncTensorParallel,
    SequenceParallelTokens,
    TPSumOfSquares,
    TPVocabParallel,
    kv_rows,
    local_positions,
)
from moefold.topology.dispatchers import dispatcher_spec
from moefold.topology.pipeline_layout import StagePlan


def install_phase_hooks(stage: nn.Module, recorder: FlightRecorder) -> None:
    """Record when a micro-batch enters the stage, and when its gradient does."""
    counter = _MicroBatchCounter(recorder)
    stage.register_forward_pre_hook(counter.before_forward)
    stage.register_forward_hook(counter.after_forward)


class _MicroBatchCounter:
    """Counts the micro-batches of a step, in order of execution."""

    def __init__(self, recorder: FlightRecorder) -> None:
        self._recorder = recorder
        self._step = -1
        self._count = 0

    def before_forward(self, stage: nn.Module, args: Any) -> None:
        if not stage.training:
            self._recorder.set_phase("evaluation")
            return
        if self._step != self._recorder.step:
            self._step = self._recorder.step
            self._count = 0
        self._recorder.set_phase(f"forward of micro-batch {self._count}")
        self._count += 1

    def after_forward(self, stage: nn.Module, args: Any, output: Tensor) -> None:
        if output.requires_grad:
            phase = f"backward of micro-batch {self._count - 1}"
            output.register_hook(lambda grad: self._recorder.set_phase(phase))


class StepRunner(Protocol):
    """Runs a batch through the stages of this rank."""

    def forward_backward(self, batch: Batch) -> Tensor:
        """Accumulate gradients; return this rank's part of the loss terms, [terms]."""
        ...

    def evaluate(self, batch: Batch) -> Tensor:
        """Return this rank's part of the loss terms, [terms], without gradients."""
        ...


@dataclass(frozen=True)
class ParallelModel:
    """Sharded stages of this rank with their runner, ready to train."""

    stages: list[Transformer]
    stage_plan: StagePlan
    """The stages of all ranks."""
    runner: StepRunner
    groups: ParallelGroups
    positions: Tensor
    """Sequence positions of this rank, int64 [S/cp]."""
    message: str = ""
    """How the open choices of the recipe were resolved; empty if it left nothing open."""
    offload: ActivationOffload | None = None
    """Activation offload between the passes; None without offload."""

    @cached_property
    def named_parameters(self) -> dict[str, nn.Parameter]:
        """All parameters of this rank by their names in the full model."""
        found: dict[str, nn.Parameter] = {}
        for stage in self.stages:
            for name, parameter in stage.named_parameters():
                # On a rank with both the first and the last stage, the first's embedding is the parameter, the last's a
                # copy.
                found.setdefault(name, parameter)
        return found

    @cached_property
    def named_buffers(self) -> dict[str, Tensor]:
        """All buffers of this rank by their names in the full model; not sharded."""
        return {name: buffer for stage in self.stages for name, buffer in stage.named_buffers()}

    def forward_backward(self, batch: Batch) -> Tensor:
        """Accumulate the gradients of the batch, reduced over every axis; return this rank's loss terms, [terms]."""
        if self.offload is not None:
            self.offload.begin_step()
        loss = self.runner.forward_backward(batch)
        sum_replicated_gradients(self.named_parameters, self.groups.attn.tp)
        if self.stages[0].cfg.model.last_stage_needs_embedding:
            allreduce_tied_embedding_grad(self.stages, self.stage_plan, self.groups.pp)
        return loss

    @property
    def duplicate_params(self) -> frozenset[str]:
        """Parameters of this rank that duplicate one of another pipeline rank: the tied embedding of the last stage."""
        first, last = self.stage_plan.embedding_ranks
        holds_copy = self.stages[0].cfg.model.last_stage_needs_embedding and first != last == self.groups.pp.rank
        return frozenset({"embedding.weight"} if holds_copy else ())

    def moe_layers(self) -> dict[int, MoELayer]:
        """Return the MoE layers of this rank by their number in the full model."""
        return {number: layer for stage in self.stages for number, layer in stage.moe_layers().items()}

    def train(self, mode: bool = True) -> None:
        """Switch between training and evaluation mode."""
        for stage in self.stages:
            stage.train(mode)


@dataclass(frozen=True)
class ShardedStages:
    """Stages of this rank, sharded along every axis, with uninitialised weights."""

    stages: list[Transformer]
    stage_plan: StagePlan
    positions: Tensor
    message: str
    offload: ActivationOffload | None


def parallelize(cfg: Config, groups: ParallelGroups) -> ParallelModel:
    """Build this rank's stages, shard them along every axis, and initialise the weights.

    Collective: FSDP may communicate. No rank holds full parameters at any time.
    """
    cfg, recompute_message = resolve_recompute(cfg, groups, device_memory(groups.device))
    sharded = build_sharded_stages(cfg, groups, for_training=True)
    for stage in sharded.stages:
        init_weights(stage, cfg.model, cfg.run.seed)
        install_phase_hooks(stage, groups.recorder)
    runner: StepRunner
    if groups.layout.pp == 1 and cfg.parallel.overlap_experts:
        runner = OverlappedAccumulation(sharded.stages[0], cfg.num_micro_batches, cfg.parallel.zero, groups)
    elif groups.layout.pp == 1:
        runner = Accumulation(sharded.stages[0], cfg.num_micro_batches, cfg.parallel.zero)
    else:
        runner = PipelineRunner(sharded.stages, sharded.stage_plan, groups, cfg)
    message = "; ".join(filter(None, (sharded.message, recompute_message)))
    return ParallelModel(
        sharded.stages, sharded.stage_plan, runner, groups, sharded.positions, message, sharded.offload
    )


def build_sharded_stages(cfg: Config, groups: ParallelGroups, *, for_training: bool) -> ShardedStages:
    """Build this rank's stages on the meta device, shard them along every axis, and allocate the weights uninitialised.

    Args:
        cfg: the recipe.
        groups: the process groups of its mapping.
        for_training: master weights, sharded over the data-parallel ranks too. Else the weights are in the compute
            type, sharded by model parallelism only; routers never compute below float32.
    """
    layout = groups.layout
    plan = plan_stages(cfg)
    positions = sequence_positions(cfg.parallel.context, cfg.train.seq_len, layout.cp, groups.attn.cp.rank)
    positions = torch.as_tensor(positions, device=groups.device)
    with torch.device("meta"):
        stages = [
            Transformer(cfg, stage.parts.layers, is_first=stage.is_first, is_last=stage.is_last)
            for stage in plan.of_rank(groups.pp.rank)
        ]
    selection = select_dispatcher(cfg, groups)
    # Inference computes in the type of the weights, even if they were trained with low-precision GEMMs.
    if not for_training:
        plain = replace(cfg.train, precision="dtype"), replace(cfg.moe, dispatch_precision="dtype")
        cfg = replace(cfg, train=plain[0], moe=plain[1])
    kernels = select_kernels(cfg, groups.device)
    dispatcher = _build_dispatcher(selection.name, cfg, groups)
    offload = open_offload(cfg.train, groups.device, groups.rank) if for_training else None
    for stage in stages:
        stage.to(master_weight_dtype(cfg) if for_training else stage.dtype)
        for layer in stage.moe_layers().values():
            layer.router.to(master_weight_dtype(cfg))
        _apply_tensor_parallel(stage, groups)
        _apply_expert_parallel(stage, groups, positions, dispatcher)
        _apply_context_parallel(stage, groups, cfg)
        apply_kernels(stage, kernels)
        if for_training:
            apply_recompute(stage, cfg.train.recompute, groups.backward_overlap)
        if offload is not None:
            apply_offload(stage, cfg.train.offload, offload)
        if layout.world_size > 1:
            shard_model_parallel(stage, groups)
            if for_training:
                shard_data_parallel(stage, groups, cfg)
        stage.to_empty(device=groups.device)
        stage.set_positions(positions)
    message = "; ".join(filter(None, (selection.message, kernels.message)))
    return ShardedStages(stages, plan, positions, message, offload)


def apply_kernels(stage: Transformer, kernels: SelectedKernels) -> None:
    """Set the selected kernels on the layers; call it before `set_positions`.

    The embedding, the head and the routers compute in higher precision than the layers.
    """
    for layer in stage.moe_layers().values():
        layer.experts.ops = kernels.expert_ops
        layer.experts.activation = kernels.expert_activation or layer.experts.activation
        layer.router.kernel = kernels.router
    for module in stage.modules():
        if isinstance(module, Attention | LatentAttention | SwiGLU | MTPBlock):
            module.linear_backend = kernels.linear_backend
        if isinstance(module, RMSNorm):
            module.kernel = kernels.norm
        if isinstance(module, SwiGLU):
            module.swiglu_kernel = kernels.swiglu
        if isinstance(module, Attention | LatentAttention) and isinstance(module.core_attention, CausalAttention):
            module.core_attention.kernel = kernels.attention
    stage.rope_kernel = kernels.rope
    if stage.is_last:
        stage.head.gemm = kernels.gemm


def _apply_tensor_parallel(stage: Transformer, groups: ParallelGroups) -> None:
    tp = groups.attn.tp
    if tp.size == 1:
        return
    vocab_parallel = TPVocabParallel(tp, stage.cfg.model.vocab_size)
    sequence_parallel = AsyncTensorParallel(tp) if stage.cfg.parallel.overlap_tp else SequenceParallelTokens(tp)
    for module in stage.modules():
        if isinstance(module, Attention | LatentAttention | SwiGLU | Embedding | Head):
            module.sequence_parallel = sequence_parallel
        if isinstance(module, Embedding | Head):
            module.vocab_parallel = vocab_parallel
        if isinstance(module, Attention):
            module.kv_rows = kv_rows(stage.cfg.model, tp)
            _apply_tp_qk_norm(module, stage.cfg.model, tp)


def _apply_tp_qk_norm(attention: Attention, cfg: ModelConfig, tp: Group) -> None:
    heads = ((attention.query_norm, cfg.num_attention_heads), (attention.key_norm, cfg.num_query_groups))
    for norm, num_heads in heads:
        if isinstance(norm, FullWidthQKNorm):
            norm.sum_of_squares = TPSumOfSquares(tp, num_heads)


def _build_dispatcher(name: str, cfg: Config, groups: ParallelGroups) -> Dispatcher[Any]:
    """Create the dispatcher that all layers share: it has no per-micro-batch state, and its buffers are large."""
    rebalance_rule = RebalanceRule(cfg.moe.llep_threshold, cfg.moe.llep_capacity, cfg.moe.llep_min_tokens)
    needs_buffer = dispatcher_spec(name).needs_buffer and groups.moe.experts.size > 1
    buffer = open_buffer(groups.moe.ep, cfg.model.hidden_size) if needs_buffer else None
    is_fp8 = cfg.moe.dispatch_precision != "dtype"
    return make_dispatcher(name, groups.moe, cfg.model.num_experts, rebalance_rule, buffer, fp8_dispatch=is_fp8)


def _apply_expert_parallel(
    stage: Transformer, groups: ParallelGroups, positions: Tensor, dispatcher: Dispatcher[Any]
) -> None:
    attn = groups.attn
    micro_batch_group = ShardedMicroBatch(attn.sequence, attn.stage, local_positions(positions, attn.tp))
    width = stage.cfg.model.hidden_size // groups.moe.etp.size
    bias_slice = slice(groups.moe.etp.rank * width, (groups.moe.etp.rank + 1) * width)
    is_checked = stage.cfg.faults.check_dispatch and groups.moe.experts.size > 1
    for number, layer in stage.moe_layers().items():
        layer.micro_batch_group = micro_batch_group
        layer.dispatcher = (
            ValidatingDispatcher(dispatcher, groups.moe, number, groups.device) if is_checked else dispatcher
        )
        layer.experts.bias_slice = bias_slice


def _apply_context_parallel(stage: Transformer, groups: ParallelGroups, cfg: Config) -> None:
    for module in stage.modules():
        if isinstance(module, Attention | LatentAttention):
            module.core_attention = context_parallel_attention(cfg.parallel.context, groups.attn.cp, module.window)
