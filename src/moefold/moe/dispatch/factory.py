"""The dispatcher by its name in the recipe."""

from typing import Any, Literal

from moefold.errors import ConfigError
from moefold.moe.dispatch.allgather import AllGatherDispatcher
from moefold.moe.dispatch.alltoall import AllToAllDispatcher
from moefold.moe.dispatch.base import Dispatcher
from moefold.moe.dispatch.local import LocalDispatcher
from moefold.parallel.groups import MoEGroups


def make_dispatcher(
    name: Literal["local", "allgather", "alltoall"], groups: MoEGroups, num_experts: int
) -> Dispatcher[Any]:
    """Make the dispatcher `parallel.dispatcher` names. On ep = etp = 1 all are the local one: there is nowhere to go.

    Args:
        name: as in the recipe.
        groups: of the MoE view.
        num_experts: E, over all ranks; ep divides it.

    Raises:
        ConfigError: `local` with experts spread over ranks.
    """
    if groups.experts.size == 1:
        return LocalDispatcher(num_experts)
    if name == "allgather":
        return AllGatherDispatcher(groups.experts, groups.expert_coordinates, num_experts)
    if name == "alltoall":
        return AllToAllDispatcher(groups.ep, groups.etp, groups.experts, groups.expert_coordinates, num_experts)
    raise ConfigError(
        f"parallel.dispatcher={name!r} needs all experts on each rank, but parallel.ep={groups.ep.size} and "
        f"parallel.etp={groups.etp.size} spread them; choose 'alltoall' or 'allgather', or ep=1 with etp=1"
    )
