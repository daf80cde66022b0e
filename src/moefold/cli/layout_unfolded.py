"""The experts of the same ranks without folding, and what folding changes, in words. Torch-free."""

from math import gcd

from moefold.parallel.layout import DEFAULT_MOE_ORDER, DEFAULT_ORDER, Layout, fold
from moefold.plan.views_chart import DrawnView, build_drawn_views


def unfolded_experts(layout: Layout) -> DrawnView | None:
    """Return the expert view that the attention of a layout would force without folding.

    Experts are then cut as attention is (etp = tp), ep is a factor of dp, and its neighbours are tp*cp ranks apart.

    Args:
        layout: the folded one.

    Returns:
        The view with the largest ep that divides both ep and dp; None where the orders are not the default ones, or
        where folding changes nothing.
    """
    orders = "-".join(layout.attention.axes), "-".join(layout.moe.axes)
    if orders != (DEFAULT_ORDER, DEFAULT_MOE_ORDER):
        return None
    ep = gcd(layout.ep, layout.dp)
    coupled = fold(world_size=layout.world_size, tp=layout.tp, cp=layout.cp, pp=layout.pp, ep=ep, etp=layout.tp)
    _, experts = build_drawn_views(coupled, coupled=True)
    same = all(experts.group_indices(axis) == layout.moe.group_indices(axis) for axis in ("ep", "etp", "edp"))
    return None if same else experts


def describe_changes(layout: Layout, experts: DrawnView, gpus_per_node: int) -> list[str]:
    """Say what folding changes: the degrees, the nodes that an ep group lies on, and the weights of a rank."""
    ep, etp = experts.degree("ep"), experts.degree("etp")
    folded, coupled = (
        max_nodes_spanned(groups, gpus_per_node)
        for groups in (layout.moe.group_indices("ep"), experts.group_indices("ep"))
    )
    words = []
    if ep != layout.ep:
        words.append(f"ep is {layout.ep} (dp {layout.dp} allows only {ep})")
    if etp != layout.etp:
        words.append(f"experts {_describe_sharding(layout.etp)} ({_describe_sharding(etp)} with etp = tp)")
    if layout.ep > 1:
        words.append(f"an ep group on {format_count(folded, 'node')}" + (f" ({coupled} without)" if ep > 1 else ""))
    held, would = layout.ep * layout.etp, ep * etp
    if held != would:
        words.append(
            f"1/{held} of a layer's expert weights on a rank ({'all' if would == 1 else f'1/{would}'} without)"
        )
    return words


def _describe_sharding(etp: int) -> str:
    return "whole" if etp == 1 else f"in {etp} pieces"


def max_nodes_spanned(groups: tuple[int, ...], gpus_per_node: int) -> int:
    """Return the most nodes that one group lies on, given the group of each rank."""
    found: dict[int, set[int]] = {}
    for rank, group in enumerate(groups):
        found.setdefault(group, set()).add(rank // gpus_per_node)
    return max(map(len, found.values()))


def format_count(number: int, noun: str) -> str:
    """Return a number with its noun."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
