"""Stages of benchmarks/gpu_half_hour.py for the constants that decide between families of mappings; one or two GPUs.

A row is named as in `DECIDING_CONSTANTS`, with the key of the device file, except the speed of host copies during an
all-gather, which no price reads. A layer's forward and backward pass hides
other work; it is repeated until it takes twice as long as that work.
"""

import statistics
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from math import ceil

import torch
from torch import Tensor, nn

from benchmarks.gpu_stage import Stage, layer_config, profile
from benchmarks.gpu_suites import SHARED_GPUS
from moefold.bench.our_step import LayerStep
from moefold.comm.collectives import all_gather_into, broadcast_object, reduce_scatter_into
from moefold.comm.groups import Group, ParallelGroups
from moefold.cost.hardware import DECIDING_CONSTANTS
from moefold.host.rank_env import RankEnv
from moefold.launch.ranks import init_distributed, run_ranks
from moefold.topology.layout import fold

HIDING_LAYER = ("qwen3-30b-a3b", 16384)
"""Preset and tokens of the layer; a GPU takes longer to compute it than the host to launch it."""
OFFLOADED_STATES = 4
"""Tensors of the size of the layer's input that a layer moves to the host and back."""
HIDDEN_BY = 2.0
"""Seconds of compute for a second of copies or collectives: enough to hide them, if they cost nothing."""
REPEATS = 10

Transfer = Callable[[], Callable[[], object]]
"""Function that starts copies or collectives during the following work, and returns a function that waits for them."""


def constants(stage: Stage) -> None:
    """Measure the constants that one GPU shows: host time and wait of a layer, and exposed copies of offload."""
    steps = LayerStep(layer_config(stage, *HIDING_LAYER), "layer", "balanced", stage.device)
    run = steps.build()
    alone_ms = stage.ms(run)
    host_ms = stage.host_ms(run)
    launches, *_ = profile(stage, run)
    _add(stage, "host_launch_s", 1e3 * host_ms / launches, "us", launches=launches, host_ms=host_ms)
    waiting_ms = _waiting_ms(stage, steps, run)
    _add(stage, "sync_s", 1e3 * (waiting_ms - alone_ms), "us", with_wait_ms=waiting_ms, without_ms=alone_ms)
    copies = _round_trip(stage, steps.x.repeat(OFFLOADED_STATES, 1, 1))
    _add(stage, "exposed_offload_fraction", **exposed_part(stage, run, copies))


def shared(stage: Stage) -> None:
    """Measure the constants that two GPUs show: exposed collectives of ZeRO-3, and host copies during an all-gather."""
    if run_ranks(partial(_shared_rank, stage), SHARED_GPUS, stage.device.type, None):
        stage.faults.append("a rank failed")


def _shared_rank(stage: Stage, rank_env: RankEnv, device_type: str) -> int:
    with init_distributed(rank_env, device_type) as device:
        stage = replace(stage, device=device)
        world = ParallelGroups.create(fold(world_size=SHARED_GPUS), device).world
        steps = LayerStep(layer_config(stage, *HIDING_LAYER), "layer", "balanced", device)
        run = steps.build()
        numel = sum(parameter.numel() for parameter in steps.module.parameters())
        shard = torch.zeros(ceil(numel / world.size), dtype=steps.x.dtype, device=device)
        full = shard.repeat(world.size)
        zero3 = exposed_part(stage, run, partial(_collectives, shard, full, world, gathers=2, reductions=1), world)
        copy = _host_copy_fraction(stage, steps.x.repeat(OFFLOADED_STATES, 1, 1), shard, full, world)
    if rank_env.rank == 0:
        _add(stage, "exposed_zero3_fraction", **zero3)
        stage.add("copy to the host during an all-gather", **copy)
    return 0


def _add(stage: Stage, key: str, value: float, unit: str = "", **details: object) -> None:
    stage.add(DECIDING_CONSTANTS[key], value, unit, key=key, **details)


def _waiting_ms(stage: Stage, steps: LayerStep, run: Callable[[], object]) -> float:
    """Return the time of a layer whose host reads the tokens of each expert before it launches the experts."""
    layer = steps.first_moe_layer
    reads = []

    def read(module: nn.Module, inputs: object) -> None:
        reads.append(layer.stats.tokens_per_expert_E.tolist())

    hook = layer.experts.register_forward_pre_hook(read)
    waiting_ms = stage.ms(run)
    hook.remove()
    if not reads:
        stage.faults.append("the layer does not call its experts")
    return waiting_ms


def _round_trip(stage: Stage, states: Tensor) -> Transfer:
    """Return copies of states to the host and back, on a separate stream."""
    on_host = torch.empty_like(states, device="cpu", pin_memory=stage.is_cuda)
    side = torch.cuda.Stream(stage.device) if stage.is_cuda else None

    def start() -> Callable[[], object]:
        if side is None:
            states.copy_(on_host.copy_(states))
            return lambda: None
        main = torch.cuda.current_stream(stage.device)
        side.wait_stream(main)
        with torch.cuda.stream(side):
            on_host.copy_(states, non_blocking=True)
            states.copy_(on_host, non_blocking=True)
        return lambda: main.wait_stream(side)

    return start


def _collectives(shard: Tensor, full: Tensor, world: Group, *, gathers: int, reductions: int) -> Callable[[], object]:
    """Start all-gathers and reduce-scatters. Return a function that waits for them."""
    works = [all_gather_into(full, shard, world.handle, async_op=True) for _ in range(gathers)]
    works += [reduce_scatter_into(shard, full, world.handle, async_op=True) for _ in range(reductions)]
    return lambda: [work.wait() for work in works if work is not None]


def exposed_part(
    stage: Stage, run: Callable[[], object], start: Transfer, world: Group | None = None
) -> dict[str, float]:
    """Return the time that a transfer adds to compute that is long enough to hide it, over the transfer's own time."""
    transfer_ms = stage.ms(lambda: start()())
    layers = _agreed(ceil(HIDDEN_BY * transfer_ms / stage.ms(run)), world)

    def compute() -> None:
        for _ in range(layers):
            run()

    def run_both() -> None:
        finish = start()
        compute()
        finish()

    compute_ms = stage.ms(compute)
    both_ms = stage.ms(run_both)
    value = (both_ms - compute_ms) / transfer_ms
    return {"value": value, "transfer_ms": transfer_ms, "compute_ms": compute_ms, "both_ms": both_ms}


def _host_copy_fraction(stage: Stage, states: Tensor, shard: Tensor, full: Tensor, world: Group) -> dict[str, float]:
    """Return the speed of a copy to the host during longer all-gathers, over its speed without them."""
    on_host = torch.empty_like(states, device="cpu", pin_memory=stage.is_cuda)

    def copy() -> None:
        on_host.copy_(states, non_blocking=True)

    alone_ms = stage.ms(copy)
    gather_ms = stage.ms(lambda: _collectives(shard, full, world, gathers=1, reductions=0)())
    gathers = _agreed(ceil(HIDDEN_BY * alone_ms / gather_ms), world)
    times = []
    for _ in range(REPEATS):
        finish = _collectives(shard, full, world, gathers=gathers, reductions=0)
        times.append(stage.one_ms(copy))
        finish()
    during_ms = statistics.median(times)
    return {"value": alone_ms / during_ms, "alone_ms": alone_ms, "during_ms": during_ms, "gather_ms": gather_ms}


def _agreed(count: int, world: Group | None) -> int:
    """Return the count of the first rank on all ranks."""
    return count if world is None else broadcast_object(count, world, 0)
