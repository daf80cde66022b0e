"""Inputs that a builder of dispatchers gets."""

from dataclasses import dataclass

from moefold.comm.groups import MoEGroups
from moefold.comm.row_exchange import RowExchange
from moefold.model.moe.dispatch.deepep import Buffer
from moefold.model.moe.dispatch.least_loaded import RebalanceRule


@dataclass(frozen=True, kw_only=True)
class DispatcherOptions:
    """Inputs of a builder: the groups, the sizes, and the parts that only some dispatchers take."""

    groups: MoEGroups
    num_experts: int
    """E, over all ranks; ep divides it."""
    rebalance_rule: RebalanceRule | None = None
    """When ranks take over routed tokens of others, for a spec with `moves_experts`."""
    buffer: Buffer | None = None
    """Buffers of DeepEP, for its dispatcher."""
    exchange: RowExchange | None = None
    """Buffers in symmetric memory, for its dispatcher."""
    fp8_dispatch: bool = False
    """Send routed tokens to the experts in 8 bits."""
