"""Check that no rank was to receive more routed tokens than its symmetric memory holds; see `DispatcherPart.room`."""

import torch
from torch import Tensor

from moefold.config.chosen import DispatchSections, chosen
from moefold.config.groups.dispatcher import DispatcherPart
from moefold.config.moe import MoEConfig
from moefold.config.parallel import ParallelConfig
from moefold.errors import RunError
from moefold.parallel.expert_parallel import largest_receive_load
from moefold.parallel.parallel_model import ParallelModel


def local_receive_load(model: ParallelModel, parallel: ParallelConfig, moe: MoEConfig) -> Tensor:
    """Return this rank's largest receive load since the last call in its slot, zeros in the other slots, [ranks].

    [0] if the dispatcher always has room.
    """
    world = model.groups.world
    has_buffer = chosen(DispatchSections(parallel, moe), DispatcherPart).room(1) is not None
    loads = torch.zeros(world.size if has_buffer else 0, dtype=torch.float64, device=model.groups.device)
    load = largest_receive_load(layer.dispatcher for layer in model.moe_layers().values())
    if load is not None:
        loads[world.rank] = load
    return loads


def check_receive_loads(loads: Tensor, parallel: ParallelConfig, moe: MoEConfig, step: str) -> None:
    """Stop the run if a rank was to receive more than it has room for: the results of this pass are void.

    Args:
        loads: of all ranks, on the host.
        step: what was computed, for the message.

    Raises:
        RunError: a load is above 1.
    """
    if not loads.numel() or float(loads.max()) <= 1:
        return
    overflow = chosen(DispatchSections(parallel, moe), DispatcherPart).overflow(float(loads.max()))
    raise RunError(f"{step} is void: rank {int(loads.argmax())} {overflow}")
