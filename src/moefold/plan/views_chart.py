"""The two views over the nodes as SVG: a cell for each GPU, coloured and numbered by its group along a chosen axis."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from markupsafe import Markup

from moefold.parallel.layout import Layout, View

CELL, GAP, HEAD = 24, 2, 15
SMALL_NODE_CELLS_PER_ROW = 4
"""Cells in a row of a node of up to twice as many; larger nodes have rows of twice as many."""


@dataclass(frozen=True)
class DrawnView:
    """A view, and its axes as a reader knows them: an axis of degrees that other axes lie between is several of it."""

    view: View
    parts_of_axis: Mapping[str, tuple[str, ...]]
    """By the name of an axis, slowest to fastest, the axes of the view that it is made of."""

    def degree(self, axis: str) -> int:
        """Size of one axis."""
        return prod(self.view.degree(part) for part in self.parts_of_axis[axis])

    def group_indices(self, axis: str) -> tuple[int, ...]:
        """For each rank the number of its group."""
        index = {rank: i for i, group in enumerate(self.view.groups(*self.parts_of_axis[axis])) for rank in group}
        return tuple(index[rank] for rank in range(self.view.world_size))

    def coordinate(self, rank: int, axis: str) -> int:
        """Position of a rank in its group."""
        return self.view.group(rank, *self.parts_of_axis[axis]).index(rank)


def build_drawn_views(layout: Layout, *, coupled: bool = False) -> tuple[DrawnView, DrawnView]:
    """Attention and experts; those of a coupled method lie within data parallelism, so that cp cuts edp in two."""
    experts = layout.moe
    spans: dict[str, tuple[str, ...]] = {axis: (axis,) for axis in experts.axes}
    if coupled:
        axes = ("pp", "replicas", "ep", "cp", "etp")
        experts = View(axes, (layout.pp, layout.dp // layout.ep, layout.ep, layout.cp, layout.etp))
        spans = {"pp": ("pp",), "edp": ("replicas", "cp"), "ep": ("ep",), "etp": ("etp",)}
    attention = {axis: (axis,) for axis in layout.attention.axes}
    return DrawnView(layout.attention, attention), DrawnView(experts, spans)


def view_chart(name: str, drawn: DrawnView, gpus_per_node: int) -> Markup:
    """One view: nodes with their GPUs, each of which knows its group along every axis.

    Args:
        name: of the view, for the script that colours and numbers the cells.
        drawn: the view.
        gpus_per_node: cells of a node.
    """
    view, groups = drawn.view, {axis: drawn.group_indices(axis) for axis in drawn.parts_of_axis}
    in_row = min(
        SMALL_NODE_CELLS_PER_ROW if gpus_per_node <= 2 * SMALL_NODE_CELLS_PER_ROW else 2 * SMALL_NODE_CELLS_PER_ROW,
        gpus_per_node,
    )
    pieces = []
    for node in range(-(-view.world_size // gpus_per_node)):
        ranks = range(node * gpus_per_node, min((node + 1) * gpus_per_node, view.world_size))
        width, height = in_row * (CELL + GAP) - GAP, HEAD + -(-len(ranks) // in_row) * (CELL + GAP)
        cells = [Markup('<text x="0" y="10" font-size="10.5" class="faint">node {}</text>').format(node)]
        for place, rank in enumerate(ranks):
            y, x = divmod(place, in_row)
            title = f"rank {rank}: " + ", ".join(f"{a} {drawn.coordinate(rank, a)}" for a in groups)
            marks = Markup(" ").join(Markup('data-{}="{}"').format(axis, groups[axis][rank]) for axis in groups)
            left, top = x * (CELL + GAP), HEAD + y * (CELL + GAP)
            form = Markup(
                '<g class="gpu" {}><title>{}</title><rect x="{}" y="{}" width="{}" height="{}" rx="3"></rect>'
                '<text x="{}" y="{}" text-anchor="middle" dominant-baseline="central"></text></g>'
            )
            box = (left, top, CELL, CELL)
            cells.append(form.format(marks, title, *box, left + CELL / 2, top + CELL / 2 + 0.5))
        form = Markup('<svg class="node" viewBox="0 0 {} {}" width="{}" height="{}">{}</svg>')
        pieces.append(form.format(width, height, width, height, Markup("").join(cells)))
    return Markup('<div class="nodes" data-view="{}">{}</div>').format(name, Markup("").join(pieces))


def axis_choices(drawn: DrawnView) -> tuple[list[tuple[str, int]], str]:
    """The axes of a view with their degrees, and the axis that is shown first: ep, or the fastest that cuts."""
    axes = [(axis, drawn.degree(axis)) for axis in drawn.parts_of_axis]
    cutting = [axis for axis, degree in axes if degree > 1]
    return axes, "ep" if "ep" in cutting else (cutting or [axes[-1][0]])[-1]
