"""One rank of a world of any size, in one process: its sharded model on the meta device. Nothing is sent."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.testing._internal.distributed.fake_pg import FakeStore

from moefold.comm.groups import ParallelGroups
from moefold.config.schema import Config
from moefold.topology.layout import fold


@contextmanager
def fake_rank(cfg: Config, rank: int) -> Iterator[ParallelGroups]:
    """The groups of one rank of a recipe, whose device is meta; inside, no other process group may exist.

    Collectives return at once and bring nothing.
    """
    p = cfg.parallel
    layout = fold(
        world_size=p.world_size, tp=p.tp, cp=p.cp, pp=p.pp, ep=p.ep, etp=p.etp, order=p.order, moe_order=p.moe_order
    )
    dist.init_process_group("fake", rank=rank, world_size=p.world_size, store=FakeStore())
    try:
        # Meshes know no meta device; what is cut along them may be there all the same.
        yield replace(ParallelGroups.create(layout, torch.device("cpu")), device=torch.device("meta"))
    finally:
        dist.destroy_process_group()


def sharded_bytes(stages: Sequence[nn.Module]) -> tuple[int, int]:
    """Bytes of the shards of FSDP with their padding, and of all weights when they are gathered, in their types."""
    weights = gathered = 0
    for stage in stages:
        for module in stage.modules():
            group = module._get_fsdp_state()._fsdp_param_group if isinstance(module, FSDPModule) else None
            if group is None:
                continue
            for one in group.fsdp_params:
                one.init_dtype_attrs(group.mp_policy)
                padded = one.padded_sharded_param_size.numel()
                degree = group._all_gather_process_group.size()
                weights += padded * one.sharded_param.element_size()
                gathered += padded * degree * (one.param_dtype or one.orig_dtype).itemsize
    return weights, gathered
