"""Check that no rank was to receive more routed tokens than its symmetric memory holds; see `DispatcherPart.room`."""

import torch
from torch import Tensor

from moefold.config.chosen import chosen
from moefold.config.groups.dispatcher import DispatcherPart
from moefold.config.schema import Config
from moefold.errors import RunError
from moefold.parallel.expert_parallel import largest_receive_load
from moefold.parallel.parallel_model import ParallelModel


def local_receive_load(model: ParallelModel, cfg: Config) -> Tensor:
    """Return this rank's largest receive load since the last call in its slot, zeros in the other slots, [ranks].

    [0] if the dispatcher always has room.
    """
    world = model.groups.world
    has_buffer = chosen(cfg, DispatcherPart).room(1) is not None
    loads = torch.zeros(world.size if has_buffer else 0, dtype=torch.float64, device=model.groups.device)
    load = largest_receive_load(layer.dispatcher for layer in model.moe_layers().values())
    if load is not None:
        loads[world.rank] = load
    return loads


def check_receive_loads(loads: Tensor, cfg: Config, step: str) -> None:
    """Stop the run if a rank was to receive more than it has room for: the results of this pass are void.

    Args:
        loads: of all ranks, on the host.
        cfg: the recipe.
        step: what was computed, for the message.

    Raises:
        RunError: a load is above 1.
    """
    if not loads.numel() or float(loads.max()) <= 1:
        return
    overflow = chosen(cfg, DispatcherPart).overflow(float(loads.max()))
    raise RunError(f"{step} is void: rank {int(loads.argmax())} {overflow}")
