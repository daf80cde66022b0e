"""Build the stages of a rank and apply the parallel axes to them, in the order of the calls."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from moefold.comm.flight_recorder import FlightRecorder
from moefold.comm.groups import ParallelGroups
from moefold.comm.private_torch import allocate
from moefold.config.chosen import chosen
from moefold.config.groups.context import ContextPart
from moefold.config.schema import Config
from moefold.config.sections.parallel import ParallelConfig
from moefold.config.sections.run import RunConfig
from moefold.cost.stage_balance import plan_stages
from moefold.cost.state_bytes import dispatch_sizes
from moefold.model.local_param import CastCopies
from moefold.model.lora import freeze_all_but_adapters
from moefold.model.loss_function import LossFunction, metrics_of
from moefold.model.module_wrapper import CallContext, wrap_calls, wrap_method
from moefold.model.transformer import Transformer, module_settings
from moefold.model.weight_init import init_weights
from moefold.objectives.recipe_loss import recipe_loss
from moefold.ops.quantization.weight_cache import WeightCache
from moefold.parallel.context_parallel import apply_context_parallel, sequence_positions
from moefold.parallel.expert_parallel import apply_expert_parallel, build_dispatcher, select_dispatcher
from moefold.parallel.fsdp import (
    keep_full_precision,
    master_weight_dtype,
    narrow_frozen_weights,
    shard_data_parallel,
    shard_model_parallel,
)
from moefold.parallel.kernels.select import apply_kernels, select_kernels
from moefold.parallel.parallel_model import ParallelModel, ShardedStages, make_runner
from moefold.parallel.recompute import apply_recompute, device_memory, resolve_recompute
from moefold.parallel.tensor_parallel import apply_tensor_parallel

if TYPE_CHECKING:
    from moefold.offload.activations import ActivationOffload


def parallelize(cfg: Config, groups: ParallelGroups, loss: LossFunction | None = None) -> ParallelModel:
    """Build this rank's stages, shard them along every axis, and initialise the weights.

    It is collective over the world. No rank holds full parameters at any time.

    Args:
        loss: the loss of the last stage. None means the recipe's loss.
    """
    cfg, recompute_message = resolve_recompute(cfg, groups, device_memory(groups.device))
    loss = loss or recipe_loss(cfg.align, cfg.train)
    if cfg.run.uses_cuda_graphs:
        from moefold.validate.cuda_graphs import check_cuda_graphs_device, check_graphed_loss

        check_cuda_graphs_device(cfg.run, groups.device.type)
        check_graphed_loss(cfg.run, [metric.name for metric in metrics_of(loss)])
    sharded = build_sharded_stages(cfg, groups, for_training=True)
    for stage in sharded.stages:
        stage.set_loss(loss)
        init_weights(stage, cfg.model, cfg.run.seed)
        wrap_method(stage, "forward", partial(wrap_calls, begin=_PhaseRecorder(stage, groups.recorder)))
    runner = make_runner(sharded.stages, sharded.stage_plan, groups, cfg.run, cfg.model, cfg.parallel, cfg.train)
    recalled = ""
    if sharded.autotuner.is_enabled:
        from moefold.parallel.kernels.timed import recall_choices

        recalled = recall_choices(sharded.autotuner, groups.device, groups.world)
    message = "; ".join(filter(None, (sharded.message, recalled, recompute_message)))
    # On several GPUs, FSDP casts the gathered weights.
    keeps_copies = groups.layout.world_size == 1 and groups.device.type == "cuda"
    parameters = (parameter for stage in sharded.stages for parameter in stage.parameters() if keeps_copies)
    cast_copies = CastCopies(parameters)
    return ParallelModel(**vars(sharded) | {"message": message}, runner=runner, cast_copies=cast_copies)


def freeze_weights(stage: Transformer) -> None:
    """Freeze all other parameters if only the indexers (in their warm-up stage) or only the adapters learn."""
    if stage.is_frozen:
        stage.requires_grad_(False)
        for indexer in stage.indexers().values():
            indexer.requires_grad_(True)
    if stage.settings.lora.trains_adapters_only:
        freeze_all_but_adapters(stage)


def _module_graphs(cfg: Config, weight_cache: WeightCache) -> Callable[[Transformer], None] | None:
    """Return the function that captures modules of a stage in CUDA graphs, or None if the recipe captures none."""
    if cfg.run.cuda_graphs not in ("attention", "attention_router"):
        return None
    from moefold.parallel.cuda_graphs import CudaGraphRecorders
    from moefold.parallel.graphed_modules import apply_cuda_graphs

    has_router = cfg.run.cuda_graphs == "attention_router"
    return partial(
        apply_cuda_graphs, weight_cache=weight_cache, make_recorder=CudaGraphRecorders(), has_router=has_router
    )


def build_sharded_stages(cfg: Config, groups: ParallelGroups, *, for_training: bool) -> ShardedStages:
    """Build this rank's stages on the meta device, shard them along every axis, and allocate the weights uninitialised.

    Wrappers of one method nest in the order of the calls, the first innermost: recomputation, then offload, CUDA
    graphs, and the phases of the flight recorder. Memory attribution wraps them in measured steps. See
    docs/design/002-modules-declare-attributes.md.

    Args:
        for_training: the weights are master weights, sharded over the data-parallel ranks too. Otherwise they are in
            the compute type, sharded by model parallelism only. Routers never compute below float32.
    """
    layout = groups.layout
    plan = plan_stages(cfg)
    of_cp_rank = sequence_positions(chosen(cfg, ContextPart), cfg.train.seq_len, layout.cp, groups.attn.cp.rank)
    positions = torch.as_tensor(of_cp_rank, device=groups.device)
    settings = module_settings(cfg)
    with torch.device("meta"):
        stages = [
            Transformer(cfg.model, settings, stage.parts.layers, is_first=stage.is_first, is_last=stage.is_last)
            for stage in plan.stages_of_rank(groups.pp.rank)
        ]
    dispatcher_part, dispatcher_message = select_dispatcher(cfg, groups)
    if not for_training:
        assert not cfg.lora.rank, "weights of inference have the adapters merged"
        cfg = cfg.for_inference()
    kernels = select_kernels(cfg, groups.device)
    sizes = dispatch_sizes(cfg.model, cfg.train, cfg.moe, layout.cp * layout.tp, stages[0].dtype.itemsize)
    dispatcher = build_dispatcher(dispatcher_part, groups.moe, sizes)
    offload: ActivationOffload | None = None
    if for_training and cfg.train.offload:
        from moefold.parallel.offload import open_offload

        offload = open_offload(cfg.train, groups.device, groups.rank)
    graph_modules = _module_graphs(cfg, kernels.weight_cache) if for_training else None
    for stage in stages:
        _set_dtypes(stage, cfg.run, for_training=for_training)
        apply_tensor_parallel(stage, groups.attn.tp, overlaps=cfg.parallel.overlap_tp)
        apply_expert_parallel(stage, groups, positions, dispatcher, is_checked=cfg.faults.check_dispatch)
        apply_context_parallel(stage, cfg.parallel, groups)
        apply_kernels(stage, kernels)
        # In the warm-up of indexers no layer saves activations.
        if for_training and not cfg.trains_indexers_only:
            _save_memory(stage, groups, offload)
        if graph_modules is not None:
            graph_modules(stage)
        _shard_weights(stage, cfg.run, cfg.parallel, groups, for_training=for_training)
        allocate(stage, groups.device)
        stage.set_positions(positions)
    return ShardedStages(
        stages=stages,
        stage_plan=plan,
        groups=groups,
        dispatcher=dispatcher_part,
        positions=positions,
        shards_data_parallel=for_training and cfg.parallel.zero > 0,
        message="; ".join(filter(None, (dispatcher_message, kernels.message))),
        offload=offload,
        weight_cache=kernels.weight_cache,
        autotuner=kernels.autotuner,
    )


def _set_dtypes(stage: Transformer, run: RunConfig, *, for_training: bool) -> None:
    """Set the dtype of each weight: master weights, or in the compute type. Some are never below float32."""
    stage.to(master_weight_dtype(run) if for_training else stage.dtype)
    keep_full_precision(stage, master_weight_dtype(run))
    if for_training and stage.settings.lora.trains_adapters_only:
        narrow_frozen_weights(stage)


def _save_memory(stage: Transformer, groups: ParallelGroups, offload: "ActivationOffload | None") -> None:
    """Recompute and offload activations."""
    train = stage.settings.train
    apply_recompute(stage, train.recompute, groups.backward_overlap)
    if offload is not None:
        from moefold.parallel.offload import apply_offload

        apply_offload(stage, train.offload, offload)


def _shard_weights(
    stage: Transformer, run: RunConfig, parallel: ParallelConfig, groups: ParallelGroups, *, for_training: bool
) -> None:
    """Shard the weights by model parallelism, and in training over the data-parallel ranks. Freeze some."""
    has_ranks = groups.layout.world_size > 1
    if has_ranks:
        shard_model_parallel(stage, groups)
    if for_training:
        # FSDP reads which parameters are frozen.
        freeze_weights(stage)
        if has_ranks:
            shard_data_parallel(stage, groups, run, parallel)


class _PhaseRecorder:
    """Records when a micro-batch enters the stage, and when its gradient enters it, in order of execution.

    Overlapped passes do not call `forward`. Their runner records the phases itself.
    """

    def __init__(self, stage: Transformer, recorder: FlightRecorder) -> None:
        self._stage = stage
        self._recorder = recorder
        self._step = -1
        self._count = 0

    def __call__(self, *args: Any, **kwargs: Any) -> CallContext | None:
        if not self._stage.training:
            # The caller names these passes: sampling, log-probabilities or a validation.
            return None
        if self._step != self._recorder.step:
            self._step = self._recorder.step
            self._count = 0
        number = self._count
        self._count += 1
        self._recorder.set_phase(f"forward of micro-batch {number}")

        def on_end(output: Tensor) -> None:
            if output.requires_grad:
                output.register_hook(lambda grad: self._recorder.set_phase(f"backward of micro-batch {number}"))

        return CallContext(nullcontext, on_end)
