"""All-to-all that sends a token once to each ep rank that holds any of its experts, and returns one partial sum."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from moefold.config.groups.dispatcher import DispatcherPart, DispatchSizes

if TYPE_CHECKING:
    from moefold.comm.groups import MoEGroups
    from moefold.parts.dispatcher.dedup_alltoall.module import DedupAllToAllDispatcher


@dataclass(frozen=True, kw_only=True)
class DedupAllToAllDispatcherPart(DispatcherPart):
    """Send a token once to each rank, for any number of its experts there."""

    needs_spread_experts: ClassVar[bool] = True
    sends_once: ClassVar[bool] = True
    needs_whole_experts: ClassVar[bool] = True
    is_searched: ClassVar[bool] = False

    def build(self, groups: "MoEGroups", sizes: DispatchSizes) -> "DedupAllToAllDispatcher":
        """Return the dispatcher."""
        from moefold.parts.dispatcher.dedup_alltoall.module import DedupAllToAllDispatcher

        return DedupAllToAllDispatcher(groups.ep, sizes.num_experts, fp8_dispatch=sizes.fp8_dispatch)
