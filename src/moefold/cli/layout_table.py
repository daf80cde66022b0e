"""The two views of a layout as text: node by node, then group by group."""

from collections.abc import Iterator
from math import lcm

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from moefold.parallel.layout import Layout, View

PALETTE = ("cyan", "yellow", "magenta", "green", "blue", "red", "bright_cyan", "bright_yellow")
MAX_NODES = 16
EDGE_NODES = 4
GROUPS_WIDTH = 72
MAX_LISTED_RANKS = 1 << 18
"""Ranks that --json lists, each in its group of every axis: 20 MB."""


def node_ranks(world_size: int, gpus_per_node: int) -> list[range]:
    """The ranks of each node, in order; the last node may be smaller."""
    return [range(first, min(first + gpus_per_node, world_size)) for first in range(0, world_size, gpus_per_node)]


def named_views(layout: Layout) -> tuple[tuple[str, View], tuple[str, View]]:
    """Both views under the names that a reader sees."""
    return (("attention", layout.attention), ("experts", layout.moe))


def print_layout(console: Console, layout: Layout, gpus_per_node: int) -> None:
    """Print the degrees, the place of each rank of each node, and the groups of each axis.

    A place is `group:member`: `3:1` is member 1 of group 3 of that axis. Beyond 16 nodes the ones in the middle are
    left out, because they repeat the pattern.
    """
    num_nodes = -(-layout.world_size // gpus_per_node)
    console.print(f"{_count(layout.world_size, 'rank')} on {_count(num_nodes, 'node')}", style="bold")
    for name, view in named_views(layout):
        factors = " x ".join(f"{axis} {degree}" for axis, degree in zip(view.axes, view.degrees, strict=True))
        console.print(f"  {name:9}  {factors}  (slowest to fastest)", highlight=False)
    console.print("  g:m is member m of group g along that axis; - is a group of one", style="dim", highlight=False)
    whole = num_nodes <= MAX_NODES
    for node in range(num_nodes) if whole else (*range(EDGE_NODES), num_nodes - 1):
        if not whole and node == num_nodes - 1:
            listed = "; --json lists every group" if layout.world_size <= MAX_LISTED_RANKS else ""
            console.print(f"\n... {num_nodes - EDGE_NODES - 1} nodes left out{listed} ...")
        first = node * gpus_per_node
        _print_node(console, layout, range(first, min(first + gpus_per_node, layout.world_size)), node)
    console.print()
    console.print(_groups_table(layout, gpus_per_node))


def _group_position(view: View, axis: str, rank: int) -> Text:
    """The place of a rank along one axis, coloured by group."""
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
        part = ranks[first : first + per_table]
        span = f"rank {part[0]}" if len(part) == 1 else f"ranks {part[0]}-{part[-1]}"
        table = _table(f"node {node}, {span}")
        table.add_column("", no_wrap=True)
        table.add_column("rank", no_wrap=True)
        for rank in part:
            table.add_column(str(rank), justify="right", no_wrap=True)
        for name, view in named_views(layout):
            for axis in view.axes:
                label = name if axis == view.axes[0] else ""
                table.add_row(label, axis, *(places[axis, rank] for rank in part), end_section=axis == view.axes[-1])
        console.print()
        console.print(table)


def _table(title: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, show_edge=False)
    table.pad_edge, table.padding = False, (0, 1, 0, 0)
    return table


def _groups_table(layout: Layout, gpus_per_node: int) -> Table:
    table = _table("groups")
    table.add_column("", no_wrap=True)
    table.add_column("axis", no_wrap=True)
    table.add_column("groups", justify="right", no_wrap=True)
    table.add_column("of", justify="right", no_wrap=True)
    table.add_column("nodes", justify="right", no_wrap=True)
    table.add_column("ranks of each group")
    for name, view in named_views(layout):
        for axis in view.axes:
            degree, label = view.degree(axis), name if axis == view.axes[0] else ""
            reach = _max_nodes_spanned(view, axis, gpus_per_node)
            row = (label, axis, str(view.world_size // degree), str(degree), str(reach), _list_groups(view, axis))
            table.add_row(*row, end_section=axis == view.axes[-1])
    return table


def _max_nodes_spanned(view: View, axis: str, gpus_per_node: int) -> int:
    """Most nodes that a group of an axis lies on."""
    stride, degree = view.stride(axis), view.degree(axis)
    if stride >= gpus_per_node:
        return degree
    # Where a group begins on its node repeats itself, and a smaller stride leaves no node out.
    firsts = _first_members(view, axis, min(view.world_size, lcm(stride * degree, gpus_per_node)))
    return max((first + (degree - 1) * stride) // gpus_per_node - first // gpus_per_node + 1 for first in firsts)


def _first_members(view: View, axis: str, below: int) -> Iterator[int]:
    stride = view.stride(axis)
    for block in range(0, below, stride * view.degree(axis)):
        yield from range(block, block + stride)


def _list_groups(view: View, axis: str) -> str:
    """The groups as `{0,1} {2,3} ...`, cut where they no longer fit; groups of one are not worth a list."""
    stride, degree = view.stride(axis), view.degree(axis)
    if degree == 1:
        return "each rank by itself"
    text = ""
    for first in _first_members(view, axis, view.world_size):
        word = "{" + _list_ranks(range(first, first + degree * stride, stride)) + "}"
        if text and len(text) + len(word) > GROUPS_WIDTH:
            return text + "..."
        text += word + " "
    return text.rstrip()


def _list_ranks(ranks: range) -> str:
    step = ranks.step
    if len(ranks) <= 4:
        return ",".join(map(str, ranks))
    return f"{ranks[0]}-{ranks[-1]}" if step == 1 else f"{ranks[0]},{ranks[1]},..,{ranks[-1]}"


def _count(n: int, noun: str) -> str:
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"
