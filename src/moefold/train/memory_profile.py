"""Memory measurement: one real step under a memory tracker, or the sharded state of any rank on the meta device.

The tests of the memory formulas compare with these numbers.
"""

import multiprocessing
import signal
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from moefold.comm.groups import ParallelGroups, fake_rank, sharded_bytes
from moefold.config.chosen import chosen, default_part
from moefold.config.groups.dispatcher import DispatcherPart
from moefold.config.model import ModelConfig
from moefold.config.schema import Config
from moefold.config.sections.run import RunConfig
from moefold.config.sections.train import TrainConfig
from moefold.cost.adapter_spec import expert_names
from moefold.cost.state_bytes import StateBytes, exchange_sizes
from moefold.data.dataset import DataRequest
from moefold.host.processes import block_signals
from moefold.metrics.memory_tracker import GATHERED_WEIGHTS, MemoryTracker
from moefold.model.local_param import local_tensor
from moefold.optim.build import build_optimizer
from moefold.optim.outer import OuterOptimizer
from moefold.optim.states import StateStore, is_moment
from moefold.parallel.batch import Batch
from moefold.parallel.memory_tracking import NOT_ACTIVATIONS
from moefold.parallel.parallelize import build_sharded_stages, parallelize
from moefold.progress import ProgressCallback, ignore_progress
from moefold.topology.layout import fold_mapping
from moefold.train.batch_sharding import BatchSharder
from moefold.train.train_step import TrainingStep


@dataclass(frozen=True)
class MeasuredMemory:
    """Memory of a rank during a step, in bytes by part."""

    rank: int
    pp_rank: int
    total: int
    """Peak of all parts together."""
    peak: dict[str, int]
    """Bytes by part at the peak."""
    activations: int
    """Peak of the activations, possibly at another time."""
    activation_peak: dict[str, int]
    """Bytes by part at the activation peak."""
    gathered: int
    """All-gathered weights at the activation peak. During an all-gather there are more, one layer at a time."""
    after: dict[str, int]
    """Bytes by part after the passes, with all gradients."""
    routed: list[int]
    """This rank's routed tokens per expert, summed over its layers."""


def measure_rank(cfg: Config, report: ProgressCallback = ignore_progress) -> MeasuredMemory:
    """Measure one training step on this rank of the default process group, on the CPU. It is collective."""
    report("building the model")
    p = cfg.parallel
    layout = fold_mapping(p)
    groups = ParallelGroups.create(layout, torch.device("cpu"))
    training = TrainingStep(parallelize(cfg, groups), cfg)
    data = DataRequest.of(cfg).open()
    batch = BatchSharder(data.train, cfg.batch_shape, groups, training.model.positions).batch(0)
    report(f"one step on {groups.world.size} ranks")
    tracker = measure_step(training, batch)
    peak = tracker.peak()
    activations = tracker.peak(lambda part: part not in NOT_ACTIVATIONS)
    activation_peak = {part: size for part, size in activations.by_part.items() if part not in NOT_ACTIVATIONS}
    return MeasuredMemory(
        rank=groups.rank,
        pp_rank=layout.attention.coordinate(groups.rank, "pp"),
        total=peak.total,
        peak=peak.by_part,
        activations=activations.total,
        activation_peak=activation_peak,
        gathered=activations.by_part.get(GATHERED_WEIGHTS, 0),
        after=tracker.current(),
        routed=[
            sum(counts)
            for counts in zip(
                *(layer.stats.tokens_per_expert_E.tolist() for layer in training.model.moe_layers().values()),
                strict=True,
            )
        ],
    )


def measure_step(training: TrainingStep, batch: Batch) -> MemoryTracker:
    """Run the passes of step 1 under a memory tracker. It is collective."""
    with training.track_memory(batch) as tracker:
        training.begin_step(1, batch)
        training.forward_backward(batch, 1)
    return tracker


def sharded_state_bytes(cfg: Config, rank: int) -> StateBytes:
    """Return the state bytes of one rank, from its stages and optimizer built on the meta device.

    Gradients (absent before a step) and offloaded moments are not counted. Runs in a child process, because torch
    caches values of a device mesh, including this rank's coordinate, for all equal meshes of the process.
    """
    with block_signals([signal.SIGINT], starts_python=False):
        # The child must not handle Ctrl-C. This process does.
        pool = multiprocessing.get_context("fork").Pool(1)
    with pool:
        return pool.apply(_state_bytes_in_child, (cfg, rank))


def _state_bytes_in_child(cfg: Config, rank: int) -> StateBytes:
    """Return the state bytes of one rank, in a process of its own."""
    # The threads that OpenMP would wait for exist in the parent only.
    torch.set_num_threads(1)
    # Activations are not counted here, and nothing may be written to disk.
    cfg = replace(cfg, train=replace(cfg.train, offload=()))
    dispatcher = chosen(cfg, DispatcherPart)
    sizes = exchange_sizes(cfg)
    # From buffers on the meta device.
    buffers = 0 if sizes is None else dispatcher.measured_reserved_bytes(sizes)
    if dispatcher.kernel_package or dispatcher.resolves_to:
        # The weights do not depend on it, and its package need not be installed here.
        cfg = replace(cfg, parallel=replace(cfg.parallel, dispatcher=default_part(DispatcherPart).kind))
    with fake_rank(cfg.parallel, rank) as groups:
        stages = build_sharded_stages(cfg, groups, for_training=True).stages
        parameters: dict[str, nn.Parameter] = {}
        for stage in stages:
            for name, parameter in stage.named_parameters():
                parameters.setdefault(name, parameter)
        if cfg.parallel.world_size > 1:
            weights, gathered = sharded_bytes(stages)
        else:
            weights = sum(map(_tensor_bytes, parameters.values()))
            gathered = _cast_copy_bytes(cfg.run, cfg.model, parameters)
        trained = {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}
        experts = expert_names(cfg.model, cfg.lora)
        # All sites have the same number of experts.
        sites = replace(cfg.sites, number=0)
        owned = trained
        if sites.owns_experts:
            owned = sites.part.own_parameters(trained, experts, sites.count, 0).parameters
        optimizer = build_optimizer(owned, cfg.run, cfg.model, cfg.train, cfg.lora, groups.attn.stage)
        states = [(name, local_tensor(x)) for state in optimizer.state.values() for name, x in state.items()]
        moments = sum(
            0 if is_moment(optimizer, name) and _is_offloaded(cfg.train, shard) else _tensor_bytes(shard)
            for name, shard in states
        )
        if cfg.sites.is_active:
            outer = (sites.part.outer() or OuterOptimizer)(trained, {}, sites, StateStore(), experts=experts)
            shards = [local_tensor(tensor) for tensor in outer.entries().values()]
            moments += sum(_tensor_bytes(shard) for shard in shards if not _is_offloaded(cfg.train, shard))
        # `init_weights` keeps the type of integer buffers and makes all others float32.
        all_buffers = [buffer for stage in stages for buffer in stage.buffers()]
        buffers += sum(b.numel() * (torch.float32 if b.is_floating_point() else b.dtype).itemsize for b in all_buffers)
        ropes = [stage.rope for stage in stages if stage.rope is not None]
        buffers += sum(_tensor_bytes(rope.cos) + _tensor_bytes(rope.sin) for rope in ropes)
    return StateBytes(weights=weights, gathered=gathered, optimizer=moments, buffers=buffers)


def _cast_copy_bytes(run: RunConfig, model: ModelConfig, parameters: dict[str, nn.Parameter]) -> int:
    """Return the bytes of bfloat16 weight copies on a single rank: all but routers and untied embeddings."""
    if run.dtype != "bfloat16":
        return 0
    not_cast = ("embedding.weight",) if not model.tie_embeddings else ()
    cast = [p for name, p in parameters.items() if ".router." not in name and name not in not_cast]
    return sum(p.numel() for p in cast) * torch.bfloat16.itemsize


def _is_offloaded(train: TrainConfig, moment: Tensor) -> bool:
    return train.offload_optimizer != "none" and _tensor_bytes(moment) >= max(train.offload_min_kib * 2**10, 1)


def _tensor_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
