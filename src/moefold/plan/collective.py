"""Time of collectives by algorithm and link level, for groups of ranks at a stride. Torch-free.

Ranks are laid out with tp fastest, so a group of `size` ranks at a distance of `stride` lies within one link level or
is spread over several units of it (nodes, NVLink domains). Volumes over the outer level pass the network card of each
rank, of which a unit has as many as ranks of the group.
"""

from dataclasses import dataclass
from math import comb, log2

from moefold.plan.device import Device, Link


@dataclass(frozen=True, slots=True)
class Group:
    """Ranks `first + i * stride`, i < size."""

    size: int
    stride: int


def ranks_inside(group: Group, link: Link) -> int:
    """Ranks of the group that one unit of a level holds: the largest divisor of its size that fits."""
    if link.gpus == 0 or group.size * group.stride <= link.gpus:
        return group.size
    inside = max(1, link.gpus // group.stride)
    while group.size % inside:
        inside -= 1
    return inside


def gather_s(device: Device, group: Group, whole_bytes: float) -> float:
    """All-gather to `whole_bytes` on each rank, or reduce-scatter from them: rings in each level at once."""
    if group.size == 1:
        return 0.0
    slowest, latency, below = 0.0, 0.0, 1
    for link in device.links:
        inside = ranks_inside(group, link)
        if inside > below:
            units = inside // below
            # A unit's ranks each bring their own card to the ring of this level.
            share = whole_bytes * inside / group.size * (units - 1) / units / below
            slowest = max(slowest, share / (link.bytes_per_s * link.fraction))
            latency += link.latency_s * (1 + log2(units))
            below = inside
        if inside == group.size:
            break
    return slowest + latency


def all_reduce_s(device: Device, group: Group, whole_bytes: float) -> float:
    """Reduce-scatter and all-gather."""
    return 2.0 * gather_s(device, group, whole_bytes)


def exchange_s(device: Device, group: Group, sent_bytes: float, *, routing: "Routing | None" = None) -> float:
    """All-to-all, of `sent_bytes` on each rank with those that stay.

    Args:
        device: whose links.
        group: the ranks.
        sent_bytes: bytes of all copies of the tokens of one rank.
        routing: given for kernels that send a token once to each rank, and over the network once to each unit of it
            (DeepEP, HybridEP); None: every copy travels.
    """
    if group.size == 1:
        return 0.0
    slowest, latency, below = 0.0, 0.0, 1
    for link in device.links:
        inside = ranks_inside(group, link)
        if inside > below:
            units, all_units = inside // below, group.size // below
            share = routing.reached(all_units) / routing.copies if routing else 1.0
            away = (units - 1) / all_units * share
            slowest = max(slowest, sent_bytes * away / (link.bytes_per_s * link.fraction))
            latency = max(latency, link.latency_s * (1 + log2(units)))
            below = inside
        if inside == group.size:
            break
    return slowest + latency


@dataclass(frozen=True, slots=True)
class Routing:
    """Where the copies of one token go: `copies` experts, at random in `top_groups` of `num_groups` groups."""

    copies: int
    num_groups: int = 1
    top_groups: int = 1

    def reached(self, units: int) -> float:
        """How many of `units` equal parts of the experts a token has copies in, on average."""
        chosen, groups = self.top_groups, self.num_groups
        if units < groups and groups % units == 0:
            each = groups // units
            return units * (1.0 - comb(groups - each, chosen) / comb(groups, chosen))
        open_units = units * chosen / groups
        return open_units * (1.0 - (1.0 - 1.0 / open_units) ** self.copies) if open_units > 1 else open_units


def send_s(device: Device, stride: int, sent_bytes: float) -> float:
    """From one rank to one that is `stride` away."""
    link = link_between(device, stride)
    return link.latency_s + sent_bytes / (link.bytes_per_s * link.fraction)


def link_between(device: Device, stride: int) -> Link:
    """The level over which ranks at a distance talk."""
    return next((link for link in device.links if link.gpus == 0 or stride < link.gpus), device.links[-1])
