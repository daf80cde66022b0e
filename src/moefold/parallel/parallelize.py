"""Apply the axes to the model, in the order a reader would: the only place that does."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from moefold.config.schema import Config, ModelConfig
from moefold.kernels.select import Kernels, select_kernels
from moefold.model.attention import Attention
from moefold.model.core_attention import CausalAttention
from moefold.model.init import initialise
from moefold.model.latent_attention import LatentAttention
from moefold.model.mlp import SwiGLU
from moefold.model.norm import AllHeadsNorm, RMSNorm
from moefold.model.transformer import Embedding, FurtherTokenBlock, Head, Transformer
from moefold.moe.dispatch import Dispatcher, GroupScope, make_dispatcher
from moefold.moe.dispatch.checked import CheckedDispatcher
from moefold.moe.dispatch.deepep import open_buffer
from moefold.moe.dispatch.selection import select_dispatcher
from moefold.moe.dispatch.spill import SpillRule
from moefold.moe.layer import MoELayer
from moefold.offload.activations import ActivationOffload
from moefold.parallel.accumulate import Accumulation, Batch
from moefold.parallel.context import context_attention, sequence_positions
from moefold.parallel.gradients import sum_replicated_gradients
from moefold.parallel.groups import Group, ParallelGroups
from moefold.parallel.offload import apply_offload, open_offload
from moefold.parallel.paired import PairedAccumulation
from moefold.parallel.phases import note_phases
from moefold.parallel.pipeline import Pipeline, share_embedding_gradient
from moefold.parallel.recompute import apply_recompute, memory_of, settle_recompute
from moefold.parallel.sharding import master_dtype, shard_data_parallel, shard_model_parallel
from moefold.parallel.stage_plan import StagePlan, plan_stages
from moefold.parallel.tensor import HeadSquares, ShardedTokens, ShardedVocabulary, key_value_rows, local_positions
from moefold.parallel.tensor_ring import TravellingTokens


class Runner(Protocol):
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
    plan: StagePlan
    """The stages of all ranks."""
    runner: Runner
    groups: ParallelGroups
    positions: Tensor
    """Positions of a sample that this rank reads, int64 [S/cp]."""
    note: str = ""
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
        if self.stages[0].cfg.model.embeds_twice:
            share_embedding_gradient(self.stages, self.plan, self.groups.pp)
        return loss

    @property
    def counted_elsewhere(self) -> frozenset[str]:
        """Parameters of this rank of which another pipeline rank holds a copy that counts for both."""
        first, last = self.plan.embedding_ranks
        holds_copy = self.stages[0].cfg.model.embeds_twice and first != last == self.groups.pp.rank
        return frozenset({"embedding.weight"} if holds_copy else ())

    def moe_layers(self) -> dict[int, MoELayer]:
        """The MoE layers of this rank by their number in the whole model."""
        return {number: layer for stage in self.stages for number, layer in stage.moe_layers().items()}

    def train(self, mode: bool = True) -> None:
        """Switch between training and evaluation."""
        for stage in self.stages:
            stage.train(mode)


@dataclass(frozen=True)
class CutModel:
    """The stages of this rank, cut along every axis; their weights are not filled yet."""

    stages: list[Transformer]
    plan: StagePlan
    positions: Tensor
    note: str
    offload: ActivationOffload | None


def parallelize(cfg: Config, groups: ParallelGroups) -> ParallelModel:
    """Build this rank's stages, cut them along every axis, and fill them with the initial weights.

    Collective: FSDP may communicate. Parameters are whole on no rank at any time.
    """
    cfg, recompute_note = settle_recompute(cfg, groups, memory_of(groups.device))
    cut = cut_model(cfg, groups, is_trained=True)
    for stage in cut.stages:
        initialise(stage, cfg.model, cfg.run.seed)
        note_phases(stage, groups.record)
    runner: Runner
    if groups.layout.pp == 1 and cfg.parallel.overlap_experts:
        runner = PairedAccumulation(cut.stages[0], cfg.num_micro_batches, cfg.parallel.zero, groups)
    elif groups.layout.pp == 1:
        runner = Accumulation(cut.stages[0], cfg.num_micro_batches, cfg.parallel.zero)
    else:
        runner = Pipeline(cut.stages, cut.plan, groups, cfg)
    note = "; ".join(filter(None, (cut.note, recompute_note)))
    return ParallelModel(cut.stages, cut.plan, runner, groups, cut.positions, note, cut.offload)


def cut_model(cfg: Config, groups: ParallelGroups, *, is_trained: bool) -> CutModel:
    """Build this rank's stages and cut them along every axis; what the weights hold is left open.

    Args:
        cfg: the recipe.
        groups: of its mapping.
        is_trained: the weights are master weights, cut over the data-parallel ranks too. Else each rank holds its part
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
    if not is_trained:
        plain = replace(cfg.train, precision="dtype"), replace(cfg.moe, dispatch_precision="dtype")
        cfg = replace(cfg, train=plain[0], moe=plain[1])
    kernels = select_kernels(cfg, groups.device)
    dispatcher = _dispatcher(selection.name, cfg, groups)
    offload = open_offload(cfg.train, groups.device, groups.rank) if is_trained else None
    for stage in stages:
        stage.to(master_dtype(cfg) if is_trained else stage.dtype)
        for layer in stage.moe_layers().values():
            layer.router.to(master_dtype(cfg))
        _apply_tensor_parallel(stage, groups)
        _apply_expert_parallel(stage, groups, positions, dispatcher)
        _apply_context_parallel(stage, groups, cfg)
        apply_kernels(stage, kernels)
        if is_trained:
            apply_recompute(stage, cfg.train.recompute, groups.beside)
        if offload is not None:
            apply_offload(stage, cfg.train.offload, offload)
        if layout.world_size > 1:
            shard_model_parallel(stage, groups)
            if is_trained:
                shard_data_parallel(stage, groups, cfg)
        stage.to_empty(device=groups.device)
        stage.place(positions)
    note = "; ".join(filter(None, (selection.note, kernels.note)))
    return CutModel(stages, plan, positions, note, offload)


def apply_kernels(stage: Transformer, kernels: Kernels) -> None:
    """Let the layers compute with what was selected; before the stage is told its positions.

    The embedding, the head and the routers compute in a wider type than the layers.
    """
    for layer in stage.moe_layers().values():
        layer.experts.kernels = kernels.rows
        layer.experts.gate = kernels.expert_gate or layer.experts.gate
        layer.experts.gemm = kernels.gemm
        layer.router.kernel = kernels.routing
    for module in stage.modules():
        if isinstance(module, Attention | LatentAttention | SwiGLU | FurtherTokenBlock):
            module.products = kernels.products
        if isinstance(module, RMSNorm):
            module.kernel = kernels.norm
        if isinstance(module, SwiGLU):
            module.gate_kernel = kernels.gate
        if isinstance(module, Attention | LatentAttention) and isinstance(module.core, CausalAttention):
            module.core.kernel = kernels.attention
    stage.turn = kernels.turn
    if stage.is_last:
        stage.head.gemm = kernels.gemm


def _apply_tensor_parallel(stage: Transformer, groups: ParallelGroups) -> None:
    tp = groups.attn.tp
    if tp.size == 1:
        return
    vocabulary = ShardedVocabulary(tp, stage.cfg.model.vocab_size)
    tokens = TravellingTokens(tp) if stage.cfg.parallel.overlap_tp else ShardedTokens(tp)
    for module in stage.modules():
        if isinstance(module, Attention | LatentAttention | SwiGLU | Embedding | Head):
            module.tokens = tokens
        if isinstance(module, Embedding | Head):
            module.vocabulary = vocabulary
        if isinstance(module, Attention):
            module.key_value_rows = key_value_rows(stage.cfg.model, tp)
            _sum_squares_over_tp(module, stage.cfg.model, tp)


def _sum_squares_over_tp(attention: Attention, cfg: ModelConfig, tp: Group) -> None:
    heads = ((attention.query_norm, cfg.num_attention_heads), (attention.key_norm, cfg.num_query_groups))
    for norm, num_heads in heads:
        if isinstance(norm, AllHeadsNorm):
            norm.sum_of_squares = HeadSquares(tp, num_heads)


def _dispatcher(name: str, cfg: Config, groups: ParallelGroups) -> Dispatcher[Any]:
    """The dispatcher of all layers: it keeps nothing of a micro-batch, and buffers are worth sharing."""
    spill = SpillRule(cfg.moe.llep_threshold, cfg.moe.llep_capacity, cfg.moe.llep_min_tokens)
    needs_buffer = name == "deepep" and groups.moe.experts.size > 1
    buffer = open_buffer(groups.moe.ep, cfg.model.hidden_size) if needs_buffer else None
    packs = cfg.moe.dispatch_precision != "dtype"
    return make_dispatcher(name, groups.moe, cfg.model.num_experts, spill, buffer, packs=packs)


def _apply_expert_parallel(
    stage: Transformer, groups: ParallelGroups, positions: Tensor, dispatcher: Dispatcher[Any]
) -> None:
    attn = groups.attn
    scope = GroupScope(attn.sequence, attn.stage, local_positions(positions, attn.tp))
    width = stage.cfg.model.hidden_size // groups.moe.etp.size
    bias_columns = slice(groups.moe.etp.rank * width, (groups.moe.etp.rank + 1) * width)
    is_checked = stage.cfg.faults.check_dispatch and groups.moe.experts.size > 1
    for number, layer in stage.moe_layers().items():
        layer.scope = scope
        layer.dispatcher = (
            CheckedDispatcher(dispatcher, groups.moe, number, groups.device) if is_checked else dispatcher
        )
        layer.experts.bias_columns = bias_columns


def _apply_context_parallel(stage: Transformer, groups: ParallelGroups, cfg: Config) -> None:
    for module in stage.modules():
        if isinstance(module, Attention | LatentAttention):
            module.core = context_attention(cfg.parallel.context, groups.attn.cp, module.window)
