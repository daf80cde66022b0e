"""Cost model of collectives, by algorithm and link level, for groups of ranks at a stride.

Ranks are laid out with tp fastest. So a group of `size` ranks at a distance of `stride` lies within one link level, or
spans several of its units (nodes, NVLink domains). Traffic over the outer level passes the NIC of each rank. A unit has
as many NICs as ranks of the group.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import comb, log2
from typing import Any, NamedTuple

import numpy as np

from moefold.cost.hardware import Device, NetworkLink


class RankGroup(NamedTuple):
    """Ranks `first + i * stride`, i < size."""

    size: int
    stride: int


def ranks_per_unit(group: RankGroup, link: NetworkLink) -> int:
    """Return the ranks of the group in one unit of a link level: the largest divisor of its size that fits."""
    if link.gpus == 0 or group.size * group.stride <= link.gpus:
        return group.size
    inside = max(1, link.gpus // group.stride)
    while group.size % inside:
        inside -= 1
    return inside


def larger(one: Any, other: Any) -> Any:
    """Return the larger of two numbers, or of arrays elementwise. On numbers, `np.maximum` is five times as slow."""
    is_array = isinstance(one, np.ndarray) or isinstance(other, np.ndarray)
    return np.maximum(one, other) if is_array else max(one, other)


def seconds_of_groups(price: Callable[[RankGroup, Any], Any], group: RankGroup, num_bytes: Any) -> Any:
    """Return the price of a collective of a group, or of each of many groups whose sizes or strides are arrays."""
    if not any(isinstance(field, np.ndarray) for field in group):
        return price(group, num_bytes)
    sizes, strides, _ = np.broadcast_arrays(*group, num_bytes)
    found = np.zeros(len(num_bytes))
    for size, stride in set(zip(sizes.tolist(), strides.tolist(), strict=True)):
        own = (sizes == size) & (strides == stride)
        found[own] = price(RankGroup(size, stride), num_bytes[own])
    return found


def levels_of(device: Device, group: RankGroup) -> Iterator[tuple[NetworkLink, int, int]]:
    """Yield each link level that a group uses, with the ranks in a unit below it, and the units that it connects."""
    below = 1
    for link in device.links:
        inside = ranks_per_unit(group, link)
        if inside > below:
            yield link, below, inside // below
            below = inside
        if inside == group.size:
            return


def all_gather_s(device: Device, group: RankGroup, full_bytes: Any) -> Any:
    """Return the seconds of an all-gather to `full_bytes` on each rank, or a reduce-scatter from them.

    All levels run their rings concurrently. `full_bytes` is a number or an array.
    """
    slowest = latency = 0.0
    for link, below, units in levels_of(device, group):
        # All bytes pass every link of a ring. Each rank of a unit adds its own NIC to the ring of this level.
        slowest = larger(slowest, full_bytes * (units - 1) / units / below / link.reached_bytes_per_s)
        latency += link.latency_s * (log2(units) + 1)
    return slowest + latency


def all_reduce_s(device: Device, group: RankGroup, full_bytes: float) -> Any:
    """Return the seconds of an all-reduce: reduce-scatter and all-gather."""
    return 2.0 * all_gather_s(device, group, full_bytes)


def all_to_all_s(
    device: Device, group: RankGroup, sent_bytes: Any, *, routing: "GroupLimitedRouting | None" = None
) -> Any:
    """Return the seconds of an all-to-all of `sent_bytes` on each rank, its local part included.

    Args:
        sent_bytes: bytes of all routed tokens of one rank, a number or an array.
        routing: given for kernels that send a token once to each rank, and over the network once to each unit of it
            (DeepEP, HybridEP). None: once for each expert.
    """
    slowest = latency = 0.0
    for link, below, units in levels_of(device, group):
        all_units = group.size // below
        sent = sent_bytes * (routing.expected_units(all_units) / routing.top_k if routing else 1.0)
        slowest = larger(slowest, sent * (units - 1) / all_units / link.reached_bytes_per_s)
        latency = max(latency, link.latency_s * (1 + log2(units)))
    return slowest + latency


def exchange_s(device: Device, group: RankGroup, sent_bytes: float, remote_bytes: float) -> float:
    """Return the seconds of an all-to-all of unequal parts, given the bytes that the busiest rank sends or receives.

    Args:
        sent_bytes: bytes of the busiest rank, without the bytes that stay on it.
        remote_bytes: the part of `sent_bytes` that leaves the rank's unit of the first link level.
    """
    if group.size == 1:
        return 0.0
    first, *outer = device.links
    seconds = sent_bytes / first.reached_bytes_per_s
    latency = first.latency_s
    inside = ranks_per_unit(group, first)
    for link in outer:
        if inside < group.size:
            seconds = max(seconds, remote_bytes / link.reached_bytes_per_s)
            latency = max(latency, link.latency_s)
            inside = ranks_per_unit(group, link)
    return seconds + latency


@dataclass(frozen=True, slots=True)
class GroupLimitedRouting:
    """Group-limited routing: `top_k` experts, at random in `top_groups` of `num_groups` groups."""

    top_k: float
    num_groups: int = 1
    top_groups: int = 1

    def expected_units(self, units: int) -> float:
        """Return the expected number of `units` equal parts of the experts that a token is routed to."""
        chosen = self.top_groups
        groups = self.num_groups
        if units < groups and groups % units == 0:
            each = groups // units
            return units * (1.0 - comb(groups - each, chosen) / comb(groups, chosen))
        open_units = units * chosen / groups
        return open_units * (1.0 - (1.0 - 1.0 / open_units) ** self.top_k) if open_units > 1 else open_units


def p2p_s(device: Device, stride: int, sent_bytes: float) -> float:
    """Return the seconds of a send to the rank that is `stride` away."""
    link = next(link for link in device.links if link.gpus == 0 or stride < link.gpus)
    return link.latency_s + sent_bytes / link.reached_bytes_per_s
