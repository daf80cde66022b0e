"""The two views of a layout as text: node by node, then group by group."""

from collections.abc import Mapping, Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from moefold.parallel.layout import Layout, View

PALETTE = ("cyan", "yellow", "magenta", "green", "blue", "red", "bright_cyan", "bright_yellow")
MAX_NODES = 16
EDGE_NODES = 4
GROUPS_WIDTH = 72


def nodes(world_size: int, gpus_per_node: int) -> list[range]:
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
    on_nodes = nodes(layout.world_size, gpus_per_node)
    console.print(f"{_count(layout.world_size, 'rank')} on {_count(len(on_nodes), 'node')}", style="bold")
    for name, view in named_views(layout):
        factors = " x ".join(f"{axis} {degree}" for axis, degree in zip(view.axes, view.degrees, strict=True))
        console.print(f"  {name:9}  {factors}  (slowest to fastest)", highlight=False)
    console.print("  g:m is member m of group g along that axis; - is a group of one", style="dim", highlight=False)
    places = {axis: _places(view, axis) for _, view in named_views(layout) for axis in view.axes}
    whole = len(on_nodes) <= MAX_NODES
    shown = on_nodes if whole else [*on_nodes[:EDGE_NODES], on_nodes[-1]]
    for ranks in shown:
        if not whole and ranks == on_nodes[-1]:
            console.print(f"\n... {len(on_nodes) - len(shown)} nodes left out; --json lists every group ...")
        _print_node(console, layout, places, ranks, ranks[0] // gpus_per_node)
    console.print()
    console.print(_groups_table(layout, gpus_per_node))


def _places(view: View, axis: str) -> list[Text]:
    """The place of every rank along one axis, coloured by group."""
    if view.degree(axis) == 1:
        return [Text("-", style="dim")] * view.world_size
    return [
        Text(f"{group}:{view.coordinate(rank, axis)}", style=PALETTE[group % len(PALETTE)])
        for rank, group in enumerate(view.group_indices(axis))
    ]


def _print_node(
    console: Console, layout: Layout, places: Mapping[str, Sequence[Text]], ranks: range, node: int
) -> None:
    width = max(len(places[axis][rank]) for axis in places for rank in ranks)
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
                table.add_row(label, axis, *(places[axis][rank] for rank in part), end_section=axis == view.axes[-1])
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
            groups = view.groups(axis)
            reach = max(len({rank // gpus_per_node for rank in group}) for group in groups)
            label = name if axis == view.axes[0] else ""
            row = (label, axis, str(len(groups)), str(view.degree(axis)), str(reach), _list_groups(groups))
            table.add_row(*row, end_section=axis == view.axes[-1])
    return table


def _list_groups(groups: Sequence[Sequence[int]]) -> str:
    """The groups as `{0,1} {2,3} ...`, cut where they no longer fit; groups of one are not worth a list."""
    if len(groups[0]) == 1:
        return "each rank by itself"
    text = ""
    for group in groups:
        word = "{" + _list_ranks(group) + "}"
        if text and len(text) + len(word) > GROUPS_WIDTH:
            return text + "..."
        text += word + " "
    return text.rstrip()


def _list_ranks(ranks: Sequence[int]) -> str:
    step = ranks[1] - ranks[0]
    if len(ranks) <= 4:
        return ",".join(map(str, ranks))
    return f"{ranks[0]}-{ranks[-1]}" if step == 1 else f"{ranks[0]},{ranks[1]},..,{ranks[-1]}"


def _count(n: int, noun: str) -> str:
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"
