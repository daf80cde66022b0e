"""Weights and moments of any rank of any world, read off the sharded model: what the formulas are held to."""

import multiprocessing
import signal
from dataclasses import replace

from torch import Tensor, nn

from moefold.config.schema import Config, TrainConfig
from moefold.launch.child import block_signals
from moefold.metrics.state_memory import StateBytes
from moefold.model.parameter import local_tensor
from moefold.parallel.fake_world import fake_rank, sharded_bytes
from moefold.parallel.parallelize import build_sharded_stages
from moefold.train.muon import build_muon
from moefold.train.optimizer import build_optimizer

BFLOAT16_BYTES = 2
"""Of a bfloat16."""


def sharded_state_bytes(cfg: Config, rank: int) -> StateBytes:
    """Build the stages and the optimizer of one rank on the meta device, and count what they hold.

    Gradients are not counted: there are none before a step. Nor are moments that would be outside of memory.

    A child process does it: what torch finds out about a mesh, the place of this rank in it included, it keeps for all
    equal meshes of the process, those of the next rank too.
    """
    with block_signals([signal.SIGINT], starts_python=False):
        # The child leaves Ctrl-C to this process.
        pool = multiprocessing.get_context("fork").Pool(1)
    with pool:
        return pool.apply(_state_bytes_in_child, (cfg, rank))


def _state_bytes_in_child(cfg: Config, rank: int) -> StateBytes:
    # Activations do not count here, and nothing may be written.
    cfg = replace(cfg, train=replace(cfg.train, offload=()))
    with fake_rank(cfg, rank) as groups:
        stages = build_sharded_stages(cfg, groups, for_training=True).stages
        parameters: dict[str, nn.Parameter] = {}
        for stage in stages:
            for name, parameter in stage.named_parameters():
                parameters.setdefault(name, parameter)
        if cfg.parallel.world_size > 1:
            weights, gathered = sharded_bytes(stages)
        else:
            weights = sum(map(_tensor_bytes, parameters.values()))
            gathered = _cast_copy_bytes(cfg, parameters)
        has_muon = cfg.train.optimizer == "muon"
        stage_group = groups.attn.stage
        optimizer = build_muon(parameters, cfg, stage_group) if has_muon else build_optimizer(parameters, cfg.train)
        moments = sum(
            0 if name != "step" and _is_offloaded(cfg.train, local_tensor(x)) else _tensor_bytes(local_tensor(x))
            for state in optimizer.state.values()
            for name, x in state.items()
        )
        # As `initialise` makes them: whole numbers keep their type, all others are float32.
        buffers = sum(b.numel() * (4 if b.is_floating_point() else 8) for stage in stages for b in stage.buffers())
        turns = [stage.rope for stage in stages if stage.rope is not None]
        buffers += sum(_tensor_bytes(turn.cos) + _tensor_bytes(turn.sin) for turn in turns)
    return StateBytes(weights=weights, gathered=gathered, optimizer=moments, buffers=buffers)


def _cast_copy_bytes(cfg: Config, parameters: dict[str, nn.Parameter]) -> int:
    """One rank by itself reads copies of its weights in the compute type: all but the router's and a mere look-up's."""
    if cfg.run.dtype != "bfloat16":
        return 0
    wide = ("embedding.weight",) if not cfg.model.tie_embeddings else ()
    read = [p for name, p in parameters.items() if ".router." not in name and name not in wide]
    return sum(p.numel() for p in read) * BFLOAT16_BYTES


def _is_offloaded(train: TrainConfig, moment: Tensor) -> bool:
    return train.offload_optimizer != "none" and _tensor_bytes(moment) >= max(train.offload_min_kib * 2**10, 1)


def _tensor_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
