"""Expert parallelism: the dispatcher of all layers, and the ranks that share the micro-batches of the MoE layers."""

from collections.abc import Iterable
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from moefold.comm.collectives import all_reduce_max
from moefold.comm.groups import MoEGroups, ParallelGroups
from moefold.config.base.part import checked_build, make_part
from moefold.config.chosen import chosen
from moefold.config.groups.dispatcher import DispatcherPart, DispatchSizes
from moefold.config.schema import Config
from moefold.errors import ConfigError, RunError
from moefold.model.moe.dispatch import Dispatcher, LocalDispatcher, ShardedMicroBatch
from moefold.model.transformer import Transformer
from moefold.parallel.tensor_parallel import local_positions


def select_dispatcher(cfg: Config, groups: ParallelGroups) -> tuple[DispatcherPart, str]:
    """Resolve `parallel.dispatcher`. Collective for "auto", as all ranks must choose the same.

    Returns:
        The dispatcher, and the choice of "auto" with its reason, or "" if the recipe names the dispatcher.

    Raises:
        ConfigError: the recipe names a dispatcher that this rank cannot run.
    """
    part = chosen(cfg, DispatcherPart)
    name = f"parallel.dispatcher={part.kind!r}"
    if part.resolves_to and groups.moe.experts.size == 1:
        local = make_part(part.group, "local")
        return local, f"{name} took {local.kind}: ep = etp = 1, so no token leaves its rank"
    from moefold.config.rule import apply_rule

    wanted = make_part(part.group, part.resolves_to[0]) if part.resolves_to else part
    reason = next(chain(apply_rule(wanted.unsupported, cfg), wanted.unsupported_here(groups.device)), "")
    if not part.resolves_to:
        if reason:
            raise ConfigError(f"{name} cannot run: {reason}; choose 'alltoall'")
        return part, ""
    num_unable = int(all_reduce_max(torch.tensor([bool(reason)], device=groups.device).long(), groups.world))
    if not num_unable:
        return wanted, f"{name} took {wanted.kind}"
    other = make_part(part.group, part.resolves_to[1])
    reason = reason or f"another rank cannot run {wanted.kind}"
    return other, f"{name} took {other.kind}: {reason}"


def build_dispatcher(part: DispatcherPart, groups: MoEGroups, sizes: DispatchSizes) -> Dispatcher[Any]:
    """Create the dispatcher that all layers share: it has no per-micro-batch state, and its buffers are large.

    With ep = etp = 1 it is always the local dispatcher.

    Raises:
        ConfigError: it does not spread experts over ranks.
    """
    if groups.experts.size == 1:
        return LocalDispatcher(sizes.num_experts, fp8_dispatch=sizes.fp8_dispatch)
    return checked_build(part, part.build(groups, sizes), Dispatcher)


def apply_expert_parallel(
    stage: Transformer, groups: ParallelGroups, positions: Tensor, dispatcher: Dispatcher[Any], *, is_checked: bool
) -> None:
    """Give the MoE layers their dispatcher, validated if the recipe asks for it, and the ranks of their micro-batch."""
    routed = stage.config.routed
    if routed is None:
        return
    attn = groups.attn
    micro_batch_group = ShardedMicroBatch(attn.sequence, attn.stage, attn.tp, local_positions(positions, attn.tp))
    width = routed.token_size(stage.config.hidden_size) // groups.moe.etp.size
    bias_slice = slice(groups.moe.etp.rank * width, (groups.moe.etp.rank + 1) * width)
    for number, layer in stage.moe_layers().items():
        layer.micro_batch_group = micro_batch_group
        layer.dispatcher = dispatcher
        if is_checked and groups.moe.experts.size > 1:
            from moefold.model.moe.dispatch.validating import ValidatingDispatcher

            layer.dispatcher = ValidatingDispatcher(dispatcher, groups.moe, number, groups.device)
        layer.experts.bias_slice = bias_slice


def local_receive_load(dispatchers: Iterable[Dispatcher[Any]], part: DispatcherPart, groups: ParallelGroups) -> Tensor:
    """Return this rank's largest receive load since the last call in its slot, zeros in the other slots, [ranks].

    [0] if the dispatcher has no buffer that could be too small.
    """
    world = groups.world
    has_buffer = part.receive_capacity(1) is not None
    loads = torch.zeros(world.size if has_buffer else 0, dtype=torch.float64, device=groups.device)
    local_loads = [load for dispatcher in dispatchers if (load := dispatcher.take_receive_load()) is not None]
    if local_loads:
        loads[world.rank] = torch.stack(local_loads).max()
    return loads


def check_receive_loads(loads: Tensor, part: DispatcherPart, passes: str) -> None:
    """Stop the run if a rank's receive buffer was too small: the results of these passes are wrong.

    Args:
        loads: receive loads of all ranks, on the host.

    Raises:
        RunError: a load is above 1.
    """
    if not loads.numel() or float(loads.max()) <= 1:
        return
    overflow = part.overflow(float(loads.max()))
    raise RunError(f"{passes} is void: rank {int(loads.argmax())} {overflow}")
