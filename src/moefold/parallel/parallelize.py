"""Apply the axes to the model, in the order a reader would: the only place that does."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from moefold.comm.groups import Group, ParallelGroups
from moefold.config.schema import Config, ModelConfig
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
from moefold.parallel.async_tp import AsyncTensorParallel
from moefold.parallel.context_parallel import context_parallel_attention, sequence_positions
from moefold.parallel.fsdp import master_weight_dtype, shard_data_parallel, shard_model_parallel
from moefold.parallel.grad_accumulation import Accumulation, Batch
from moefold.parallel.gradients import sum_replicated_gradients
from moefold.parallel.offload import apply_offload, open_offload
from moefold.parallel.overlapped_schedule import OverlappedAccumulation
from moefold.parallel.phase_hooks import install_phase_hooks
from moefold.parallel.pipeline import PipelineRunner, allreduce_tied_embedding_grad
from moefold.parallel.recompute import apply_recompute, device_memory, resolve_recompute
from moefold.parallel.select_ops import SelectedKernels, select_kernels
from moefold.parallel.tensor_parallel import (
    SequenceParallelTokens,
    TPSumOfSquares,
    TPVocabParallel,
    kv_rows,
    local_positions,
)
from moefold.topology.stages import StagePlan


class StepRunner(Protocol):
    """How a batch goes through the stages of this rank."""

    def forward_backward(self, batch: Batch) -> Tensor:
        """Accumulate gradients; returns my part of the terms of the loss, [terms]."""
        ...

    def evaluate(self, batch: Batch) -> Tensor:
        """My part of the terms of the loss, [terms], without gradients."""
        ...


@dataclass(frozen=True)
class ParallelModel:
    """The stages of this rank, ready to train."""

    stages: list[Transformer]
    stage_plan: StagePlan
    """The stages of all ranks."""
    runner: StepRunner
    groups: ParallelGroups
    positions: Tensor
    """Positions of a sample that this rank reads, int64 [S/cp]."""
    message: str = ""
    """What the recipe left open and how it was decided; empty if it left nothing open."""
    offload: ActivationOffload | None = None
    """What takes activations out of memory between the passes."""

    @cached_property
    def named_parameters(self) -> dict[str, nn.Parameter]:
        """All parameters of this rank by their names in the whole model."""
        found: dict[str, nn.Parameter] = {}
        for stage in self.stages:
            for name, parameter in stage.named_parameters():
                # Where one rank has the first stage and the last, that of the first counts, and the other follows it.
                found.setdefault(name, parameter)
        return found

    @cached_property
    def named_buffers(self) -> dict[str, Tensor]:
        """All that is part of the model and has no gradient, by its name in the whole model; whole on every rank."""
        return {name: buffer for stage in self.stages for name, buffer in stage.named_buffers()}

    def forward_backward(self, batch: Batch) -> Tensor:
        """Add the gradients of the batch, reduced over every axis; returns my part of the loss, [terms]."""
        if self.offload is not None:
            self.offload.begin_step()
        loss = self.runner.forward_backward(batch)
        sum_replicated_gradients(self.named_parameters, self.groups.attn.tp)
        if self.stages[0].cfg.model.last_stage_needs_embedding:
            allreduce_tied_embedding_grad(self.stages, self.stage_plan, self.groups.pp)
        return loss

    @property
    def duplicate_params(self) -> frozenset[str]:
        """Parameters of this rank of which another pipeline rank holds a copy that counts for both."""
        first, last = self.stage_plan.embedding_ranks
        holds_copy = self.stages[0].cfg.model.last_stage_needs_embedding and first != last == self.groups.pp.rank
        return frozenset({"embedding.weight"} if holds_copy else ())

    def moe_layers(self) -> dict[int, MoELayer]:
        """The MoE layers of this rank by their number in the whole model."""
        return {number: layer for stage in self.stages for number, layer in stage.moe_layers().items()}

    def train(self, mode: bool = True) -> None:
        """Switch between training and evaluation."""
        for stage in self.stages:
            stage.train(mode)


@dataclass(frozen=True)
class ShardedStages:
    """The stages of this rank, cut along every axis; their weights are not filled yet."""

    stages: list[Transformer]
    stage_plan: StagePlan
    positions: Tensor
    message: str
    offload: ActivationOffload | None


def parallelize(cfg: Config, groups: ParallelGroups) -> ParallelModel:
    """Build this rank's stages, cut them along every axis, and fill them with the initial weights.

    Collective: FSDP may communicate. Parameters are whole on no rank at any time.
    """
    cfg, recompute_note = resolve_recompute(cfg, groups, device_memory(groups.device))
    cut = build_sharded_stages(cfg, groups, for_training=True)
    for stage in cut.stages:
        init_weights(stage, cfg.model, cfg.run.seed)
        install_phase_hooks(stage, groups.recorder)
    runner: StepRunner
    if groups.layout.pp == 1 and cfg.parallel.overlap_experts:
        runner = OverlappedAccumulation(cut.stages[0], cfg.num_micro_batches, cfg.parallel.zero, groups)
    elif groups.layout.pp == 1:
        runner = Accumulation(cut.stages[0], cfg.num_micro_batches, cfg.parallel.zero)
    else:
        runner = PipelineRunner(cut.stages, cut.stage_plan, groups, cfg)
    note = "; ".join(filter(None, (cut.message, recompute_note)))
    return ParallelModel(cut.stages, cut.stage_plan, runner, groups, cut.positions, note, cut.offload)


def build_sharded_stages(cfg: Config, groups: ParallelGroups, *, for_training: bool) -> ShardedStages:
    """Build this rank's stages and cut them along every axis; what the weights hold is left open.

    Args:
        cfg: the recipe.
        groups: of its mapping.
        for_training: the weights are master weights, cut over the data-parallel ranks too. Else each rank holds its part
            of the maths whole and in the compute type, but for the routers, which never compute below float32.
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
    # What only computes does so in the type of its weights, also where they were trained with fewer bits.
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
    note = "; ".join(filter(None, (selection.message, kernels.message)))
    return ShardedStages(stages, plan, positions, note, offload)


def apply_kernels(stage: Transformer, kernels: SelectedKernels) -> None:
    """Let the layers compute with what was selected; before the stage is told its positions.

    The embedding, the head and the routers compute in a wider type than the layers.
    """
    for layer in stage.moe_layers().values():
        layer.experts.kernels = kernels.expert_ops
        layer.experts.activation = kernels.expert_activation or layer.experts.activation
        layer.experts.gemm = kernels.gemm
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
    vocabulary = TPVocabParallel(tp, stage.cfg.model.vocab_size)
    tokens = AsyncTensorParallel(tp) if stage.cfg.parallel.overlap_tp else SequenceParallelTokens(tp)
    for module in stage.modules():
        if isinstance(module, Attention | LatentAttention | SwiGLU | Embedding | Head):
            module.sequence_parallel = tokens
        if isinstance(module, Embedding | Head):
            module.vocab_parallel = vocabulary
        if isinstance(module, Attention):
            module.kv_rows = kv_rows(stage.cfg.model, tp)
            _apply_tp_qk_norm(module, stage.cfg.model, tp)


def _apply_tp_qk_norm(attention: Attention, cfg: ModelConfig, tp: Group) -> None:
    heads = ((attention.query_norm, cfg.num_attention_heads), (attention.key_norm, cfg.num_query_groups))
    for norm, num_heads in heads:
        if isinstance(norm, FullWidthQKNorm):
            norm.sum_of_squares = TPSumOfSquares(tp, num_heads)


def _build_dispatcher(name: str, cfg: Config, groups: ParallelGroups) -> Dispatcher[Any]:
    """The dispatcher of all layers: it keeps nothing of a micro-batch, and buffers are worth sharing."""
    spill = RebalanceRule(cfg.moe.llep_threshold, cfg.moe.llep_capacity, cfg.moe.llep_min_tokens)
    needs_buffer = name == "deepep" and groups.moe.experts.size > 1
    buffer = open_buffer(groups.moe.ep, cfg.model.hidden_size) if needs_buffer else None
    packs = cfg.moe.dispatch_precision != "dtype"
    return make_dispatcher(name, groups.moe, cfg.model.num_experts, spill, buffer, fp8_dispatch=packs)


def _apply_expert_parallel(
    stage: Transformer, groups: ParallelGroups, positions: Tensor, dispatcher: Dispatcher[Any]
) -> None:
    attn = groups.attn
    scope = ShardedMicroBatch(attn.sequence, attn.stage, local_positions(positions, attn.tp))
    width = stage.cfg.model.hidden_size // groups.moe.etp.size
    bias_columns = slice(groups.moe.etp.rank * width, (groups.moe.etp.rank + 1) * width)
    is_checked = stage.cfg.faults.check_dispatch and groups.moe.experts.size > 1
    for number, layer in stage.moe_layers().items():
        layer.micro_batch_group = scope
        layer.dispatcher = (
            ValidatingDispatcher(dispatcher, groups.moe, number, groups.device) if is_checked else dispatcher
        )
        layer.experts.bias_slice = bias_columns


def _apply_context_parallel(stage: Transformer, groups: ParallelGroups, cfg: Config) -> None:
    for module in stage.modules():
        if isinstance(module, Attention | LatentAttention):
            module.core_attention = context_parallel_attention(cfg.parallel.context, groups.attn.cp, module.window)
