"""Text view of a layout: nodes, groups, pipeline stages, and the experts without folding."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import gcd, lcm, prod

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from moefold.cost.stage_balance import StageCost
from moefold.topology.layout import DEFAULT_MOE_ORDER, DEFAULT_ORDER, Layout, View, fold
from moefold.topology.pipeline_layout import StageParts, StagePlan


@dataclass(frozen=True)
class DrawnView:
    """A view and the axes that are drawn: a drawn axis may join several axes of the view, if others lie between."""

    view: View
    parts_of_axis: Mapping[str, tuple[str, ...]]
    """Axes of the view that form each display axis, from slowest to fastest."""

    def degree(self, axis: str) -> int:
        """Return the size of one axis."""
        return prod(self.view.degree(name) for name in self.parts_of_axis[axis])

    def group_indices(self, axis: str) -> tuple[int, ...]:
        """Return each rank's group index."""
        index = {rank: i for i, group in enumerate(self.view.groups(*self.parts_of_axis[axis])) for rank in group}
        return tuple(index[rank] for rank in range(self.view.world_size))

    def coordinate(self, rank: int, axis: str) -> int:
        """Return the position of a rank in its group."""
        return self.view.group(rank, *self.parts_of_axis[axis]).index(rank)


def build_drawn_views(layout: Layout, *, coupled: bool = False) -> tuple[DrawnView, DrawnView]:
    """Build the views of attention and experts.

    Experts of a coupled method lie within data parallelism, so cp divides edp into two axes.
    """
    experts = layout.moe
    spans: dict[str, tuple[str, ...]] = {axis: (axis,) for axis in experts.axes}
    if coupled:
        axes = ("pp", "replicas", "ep", "cp", "etp")
        experts = View(axes, (layout.pp, layout.dp // layout.ep, layout.ep, layout.cp, layout.etp))
        spans = {"pp": ("pp",), "edp": ("replicas", "cp"), "ep": ("ep",), "etp": ("etp",)}
    attention = {axis: (axis,) for axis in layout.attention.axes}
    return DrawnView(layout.attention, attention), DrawnView(experts, spans)


PALETTE = ("cyan", "yellow", "magenta", "green", "blue", "red", "bright_cyan", "bright_yellow")
MAX_NODES = 16
EDGE_NODES = 4
GROUPS_WIDTH = 72
MAX_LISTED_RANKS = 1 << 18
"""Maximum number of ranks for --json, which lists each rank in its group of every axis: 20 MB."""


def node_ranks(world_size: int, gpus_per_node: int) -> list[range]:
    """Return the ranks of each node, in order. The last node may be smaller."""
    return [range(first, min(first + gpus_per_node, world_size)) for first in range(0, world_size, gpus_per_node)]


def named_views(layout: Layout) -> tuple[tuple[str, View], tuple[str, View]]:
    """Return both views with their display names."""
    return (("attention", layout.attention), ("experts", layout.moe))


def print_layout(console: Console, layout: Layout, gpus_per_node: int) -> None:
    """Print the degrees, the position of each rank of each node, and the groups of each axis.

    A position is `group:member`: `3:1` is member 1 of group 3 of that axis. With more than 16 nodes, the nodes in the
    middle, which repeat the pattern, are left out.
    """
    nodes = node_ranks(layout.world_size, gpus_per_node)
    num_nodes = len(nodes)
    console.print(f"{format_count(layout.world_size, 'rank')} on {format_count(num_nodes, 'node')}", style="bold")
    for name, view in named_views(layout):
        factors = " x ".join(f"{axis} {degree}" for axis, degree in zip(view.axes, view.degrees, strict=True))
        console.print(f"  {name:9}  {factors}  (slowest to fastest)", highlight=False)
    console.print("  g:m is member m of group g along that axis; - is a group of one", style="dim", highlight=False)
    shows_all = num_nodes <= MAX_NODES
    for node in range(num_nodes) if shows_all else (*range(EDGE_NODES), num_nodes - 1):
        if not shows_all and node == num_nodes - 1:
            group_hint = "; --json lists every group" if layout.world_size <= MAX_LISTED_RANKS else ""
            console.print(f"\n... {num_nodes - EDGE_NODES - 1} nodes left out{group_hint} ...")
        _print_node(console, layout, nodes[node], node)
    console.print()
    console.print(_groups_table(layout, gpus_per_node))


def _group_position(view: View, axis: str, rank: int) -> Text:
    """Return the position of a rank along one axis, coloured by group."""
    if view.degree(axis) == 1:
        return Text("-", style="dim")
    group = view.group_index(rank, axis)
    return Text(f"{group}:{view.coordinate(rank, axis)}", style=PALETTE[group % len(PALETTE)])


def _print_node(console: Console, layout: Layout, ranks: range, node: int) -> None:
    places = {
        (axis, r): _group_position(view, axis, r)
        for _, view in named_views(layout)
        for axis in view.axes
        for r in ranks
    }
    width = max(map(len, places.values()))
    per_table = max(1, (console.width - len("attention  rank  ")) // (width + 2))
    for first in range(0, len(ranks), per_table):
        shown_ranks = ranks[first : first + per_table]
        span = f"rank {shown_ranks[0]}" if len(shown_ranks) == 1 else f"ranks {shown_ranks[0]}-{shown_ranks[-1]}"
        table = _table(f"node {node}, {span}", ("", "rank", *(f">{rank}" for rank in shown_ranks)))
        for name, view in named_views(layout):
            for axis in view.axes:
                label = name if axis == view.axes[0] else ""
                table.add_row(
                    label, axis, *(places[axis, rank] for rank in shown_ranks), end_section=axis == view.axes[-1]
                )
        console.print()
        console.print(table)


def _table(title: str, names: Iterable[str]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, show_edge=False)
    table.pad_edge = False
    table.padding = (0, 1, 0, 0)
    _add_columns(table, names)
    return table


def _add_columns(table: Table, names: Iterable[str]) -> None:
    """Add columns that are not wrapped. ">" before a name aligns it to the right."""
    for name in names:
        table.add_column(name.removeprefix(">"), justify="right" if name.startswith(">") else "left", no_wrap=True)


def _groups_table(layout: Layout, gpus_per_node: int) -> Table:
    table = _table("groups", ("", "axis", ">groups", ">of", ">nodes"))
    table.add_column("ranks of each group")
    for name, view in named_views(layout):
        for axis in view.axes:
            degree = view.degree(axis)
            label = name if axis == view.axes[0] else ""
            reach = _max_nodes_spanned(view, axis, gpus_per_node)
            row = (label, axis, str(view.world_size // degree), str(degree), str(reach), _list_groups(view, axis))
            table.add_row(*row, end_section=axis == view.axes[-1])
    return table


def _max_nodes_spanned(view: View, axis: str, gpus_per_node: int) -> int:
    """Return the largest number of nodes that a group of an axis spans."""
    stride = view.stride(axis)
    degree = view.degree(axis)
    if stride >= gpus_per_node:
        return degree
    # The offset of a group within its node repeats with this period, and a smaller stride skips no node.
    firsts = _first_members(view, axis, min(view.world_size, lcm(stride * degree, gpus_per_node)))
    return max((first + (degree - 1) * stride) // gpus_per_node - first // gpus_per_node + 1 for first in firsts)


def _first_members(view: View, axis: str, below: int) -> Iterator[int]:
    stride = view.stride(axis)
    for block in range(0, below, stride * view.degree(axis)):
        yield from range(block, block + stride)


def _list_groups(view: View, axis: str) -> str:
    """Return the groups as `{0,1} {2,3} ...`, truncated to `GROUPS_WIDTH`. Groups of one are not listed."""
    stride = view.stride(axis)
    degree = view.degree(axis)
    if degree == 1:
        return "each rank by itself"
    text = ""
    for first in _first_members(view, axis, view.world_size):
        group = "{" + _list_ranks(range(first, first + degree * stride, stride)) + "}"
        if text and len(text) + len(group) > GROUPS_WIDTH:
            return text + "..."
        text += group + " "
    return text.rstrip()


def _list_ranks(ranks: range) -> str:
    step = ranks.step
    if len(ranks) <= 4:
        return ",".join(map(str, ranks))
    return f"{ranks[0]}-{ranks[-1]}" if step == 1 else f"{ranks[0]},{ranks[1]},..,{ranks[-1]}"


BAR = "█"
BAR_WIDTH = 20


def print_stages(console: Console, plan: StagePlan, costs: Sequence[StageCost] | None) -> None:
    """Print the pipeline layout, and a row for each stage: its pp rank, parts, weights and FLOPs.

    FLOPs count the forward pass, relative to the busiest stage. Weights are counted on one rank. Both are in `costs`.
    """
    table = _table(f"stages, {plan.layout}", (">stage", ">pp rank"))
    table.add_column("holds")
    _add_columns(table, (">weights", "operations") if costs is not None else ())
    for stage in plan.stages:
        cells = [str(stage.index), str(stage.pp_rank), describe_stage(stage.parts)]
        if costs is not None:
            cost, max_flops = costs[stage.index], max(1, *(cost.flops for cost in costs))
            share = cost.flops / max_flops
            cells += [compact_count(cost.num_parameters), f"{share:4.0%} {BAR * round(BAR_WIDTH * share)}"]
        table.add_row(*cells)
    console.print()
    console.print(table)


def describe_stage(parts: StageParts) -> str:
    """Describe the parts of a stage."""
    names = ["embedding"] if parts.has_embedding else []
    layers = parts.layers
    if len(layers) == 1:
        names.append(f"layer {layers[0]}")
    elif layers:
        names.append(f"layers {layers[0]}-{layers[-1]}")
    if parts.num_mtp_layers:
        names.append(f"{parts.num_mtp_layers} MTP")
    if parts.has_loss:
        names.append("loss")
    return ", ".join(names) or "nothing"


def compact_count(weights: int) -> str:
    """Return a number of parameters in a short form such as 1.3 G."""
    for size, unit in ((10**9, "G"), (10**6, "M"), (10**3, "k")):
        if weights >= size:
            return f"{weights / size:.1f} {unit}"
    return str(weights)


def unfolded_experts(layout: Layout) -> DrawnView | None:
    """Return the expert view without folding: experts coupled to the attention of a layout.

    Experts are then sharded like attention (etp = tp), ep is a factor of dp, and ep neighbours are tp*cp ranks apart.

    Its ep is the largest that divides both ep and dp. None if the orders are not the default orders or folding changes
    nothing.
    """
    orders = "-".join(layout.attention.axes), "-".join(layout.moe.axes)
    if orders != (DEFAULT_ORDER, DEFAULT_MOE_ORDER):
        return None
    ep = gcd(layout.ep, layout.dp)
    coupled = fold(world_size=layout.world_size, tp=layout.tp, cp=layout.cp, pp=layout.pp, ep=ep, etp=layout.tp)
    _, experts = build_drawn_views(coupled, coupled=True)
    is_same = all(experts.group_indices(axis) == layout.moe.group_indices(axis) for axis in ("ep", "etp", "edp"))
    return None if is_same else experts


def describe_changes(layout: Layout, experts: DrawnView, gpus_per_node: int) -> list[str]:
    """Describe the changes by folding: the degrees, the nodes that an ep group spans, and the weights of a rank."""
    ep = experts.degree("ep")
    etp = experts.degree("etp")
    folded, coupled = (
        max_nodes_of_groups(groups, gpus_per_node)
        for groups in (layout.moe.group_indices("ep"), experts.group_indices("ep"))
    )
    changes = []
    if ep != layout.ep:
        changes.append(f"ep is {layout.ep} (dp {layout.dp} allows only {ep})")
    if etp != layout.etp:
        changes.append(f"experts {_describe_sharding(layout.etp)} ({_describe_sharding(etp)} with etp = tp)")
    if layout.ep > 1:
        changes.append(f"an ep group on {format_count(folded, 'node')}" + (f" ({coupled} without)" if ep > 1 else ""))
    num_shards = layout.ep * layout.etp
    unfolded_shards = ep * etp
    if num_shards != unfolded_shards:
        changes.append(
            f"1/{num_shards} of a layer's expert weights on a rank "
            f"({'all' if unfolded_shards == 1 else f'1/{unfolded_shards}'} without)"
        )
    return changes


def _describe_sharding(etp: int) -> str:
    return "whole" if etp == 1 else f"in {etp} pieces"


def max_nodes_of_groups(groups: tuple[int, ...], gpus_per_node: int) -> int:
    """Return the largest number of nodes that one group spans, given the group of each rank."""
    nodes: dict[int, set[int]] = {}
    for rank, group in enumerate(groups):
        nodes.setdefault(group, set()).add(rank // gpus_per_node)
    return max(map(len, nodes.values()))


def format_count(number: int, noun: str) -> str:
    """Return a number with its noun, in the plural unless the number is 1."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
