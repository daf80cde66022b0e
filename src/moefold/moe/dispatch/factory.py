"""The dispatcher by its name in the recipe."""

from typing import Any

from moefold.errors import ConfigError
from moefold.moe.dispatch.allgather import AllGatherDispatcher
from moefold.moe.dispatch.alltoall import AllToAllDispatcher
from moefold.moe.dispatch.base import Dispatcher
from moefold.moe.dispatch.deepep import Buffer, DeepEPDispatcher
from moefold.moe.dispatch.leastloaded import LeastLoadedDispatcher
from moefold.moe.dispatch.local import LocalDispatcher
from moefold.moe.dispatch.spill import RebalanceRule
from moefold.parallel.groups import MoEGroups


def make_dispatcher(
    name: str,
    groups: MoEGroups,
    num_experts: int,
    rebalance_rule: RebalanceRule | None = None,
    buffer: Buffer | None = None,
    *,
    fp8_dispatch: bool = False,
) -> Dispatcher[Any]:
    """Make the dispatcher `parallel.dispatcher` names. On ep = etp = 1 all are the local one: there is nowhere to go.

    Args:
        name: as in the recipe, "auto" settled.
        groups: of the MoE view.
        num_experts: E, over all ranks; ep divides it.
        rebalance_rule: of `leastloaded`, which needs it.
        buffer: of `deepep`, which needs it.
        fp8_dispatch: whether rows travel to the experts in 8 bits. They are rounded where nothing travels, too.

    Raises:
        ConfigError: `local` with experts spread over ranks.
    """
    if groups.experts.size == 1:
        return LocalDispatcher(num_experts, fp8_dispatch=fp8_dispatch)
    if name == "allgather":
        return AllGatherDispatcher(groups.experts, groups.expert_coordinates, num_experts, fp8_dispatch=fp8_dispatch)
    if name == "alltoall":
        return AllToAllDispatcher(
            groups.ep, groups.etp, groups.experts, groups.expert_coordinates, num_experts, fp8_dispatch=fp8_dispatch
        )
    if name == "leastloaded":
        assert rebalance_rule is not None, "leastloaded needs to know when copies move"
        return LeastLoadedDispatcher(groups, num_experts, rebalance_rule, fp8_dispatch=fp8_dispatch)
    if name == "deepep":
        assert buffer is not None, "deepep needs its buffers"
        return DeepEPDispatcher(buffer, num_experts, fp8_dispatch=fp8_dispatch)
    raise ConfigError(
        f"parallel.dispatcher={name!r} needs all experts on each rank, but parallel.ep={groups.ep.size} and "
        f"parallel.etp={groups.etp.size} spread them; choose 'alltoall' or 'allgather', or ep=1 with etp=1"
    )
