"""All-to-all: routed tokens over ep to their experts and back, with an all-gather over etp."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from moefold.config.groups.dispatcher import DispatcherPart, DispatchSizes

if TYPE_CHECKING:
    from moefold.comm.groups import MoEGroups
    from moefold.parts.dispatcher.alltoall.module import AllToAllDispatcher


@dataclass(frozen=True, kw_only=True)
class AllToAllDispatcherPart(DispatcherPart):
    """Send each routed token to the rank of its expert (arXiv:2504.14960)."""

    keeps_sum_order: ClassVar[bool] = True
    for_inference: ClassVar[bool] = True

    def build(self, groups: "MoEGroups", sizes: DispatchSizes) -> "AllToAllDispatcher":
        """Return the dispatcher."""
        from moefold.parts.dispatcher.alltoall.module import AllToAllDispatcher

        return AllToAllDispatcher(
            groups.ep,
            groups.etp,
            groups.experts,
            groups.expert_coordinates,
            sizes.num_experts,
            fp8_dispatch=sizes.fp8_dispatch,
        )
