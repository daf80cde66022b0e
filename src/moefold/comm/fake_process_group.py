"""Fake process group: one rank of a world of any size in one process, with its sharded model on the meta device."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import nn

from moefold.comm.groups import ParallelGroups
from moefold.comm.torch_compat import FakeStore, fsdp_group_size, fsdp_param_group
from moefold.config.schema import Config
from moefold.topology.layout import fold


@contextmanager
def fake_rank(cfg: Config, rank: int) -> Iterator[ParallelGroups]:
    """Create the groups of one rank of a recipe on the meta device; no other process group may exist meanwhile.

    Collectives return at once and transfer nothing.
    """
    p = cfg.parallel
    layout = fold(
        world_size=p.world_size, tp=p.tp, cp=p.cp, pp=p.pp, ep=p.ep, etp=p.etp, order=p.order, moe_order=p.moe_order
    )
    dist.init_process_group("fake", rank=rank, world_size=p.world_size, store=FakeStore())
    try:
        # Device meshes do not support the meta device, but tensors sharded along them may be on it.
        yield replace(ParallelGroups.create(layout, torch.device("cpu")), device=torch.device("meta"))
    finally:
        dist.destroy_process_group()


def sharded_bytes(stages: Sequence[nn.Module]) -> tuple[int, int]:
    """Return the bytes of the padded FSDP shards, and of all gathered weights in their compute types."""
    weights = gathered = 0
    for stage in stages:
        for module in stage.modules():
            group = fsdp_param_group(module)
            if group is None:
                continue
            for param in group.fsdp_params:
                param.init_dtype_attrs(group.mp_policy)
                padded = param.padded_sharded_param_size.numel()
                degree = fsdp_group_size(group)
                weights += padded * param.sharded_param.element_size()
                gathered += padded * degree * (param.param_dtype or param.orig_dtype).itemsize
    return weights, gathered
