"""The two views over the nodes as SVG: a cell for each GPU, coloured by its group along a chosen axis."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from markupsafe import Markup

from moefold.parallel.layout import Layout, View

CELL, GAP, NODE_GAP, HEAD = 15, 2, 12, 16
WIDTH = 560
WHEEL = 0.61803
"""Neighbouring groups are so much of the colour wheel apart."""


@dataclass(frozen=True)
class DrawnView:
    """A view, and its axes as a reader knows them: an axis of degrees that other axes lie between is several of it."""

    view: View
    spans: Mapping[str, tuple[str, ...]]
    """By the name of an axis, slowest to fastest, the axes of the view that it is made of."""

    def degree(self, axis: str) -> int:
        """Size of one axis."""
        return prod(self.view.degree(part) for part in self.spans[axis])

    def group_indices(self, axis: str) -> tuple[int, ...]:
        """For each rank the number of its group."""
        index = {rank: i for i, group in enumerate(self.view.groups(*self.spans[axis])) for rank in group}
        return tuple(index[rank] for rank in range(self.view.world_size))

    def coordinate(self, rank: int, axis: str) -> int:
        """Position of a rank in its group."""
        return self.view.group(rank, *self.spans[axis]).index(rank)


def drawn_views(layout: Layout, *, coupled: bool = False) -> tuple[DrawnView, DrawnView]:
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
        name: of the view, for the script that colours it.
        drawn: the view.
        gpus_per_node: cells of a node, in rows of 8.
    """
    view, groups = drawn.view, {axis: drawn.group_indices(axis) for axis in drawn.spans}
    in_row = min(8, gpus_per_node)
    node_width = in_row * (CELL + GAP) + NODE_GAP
    node_height = HEAD + -(-gpus_per_node // in_row) * (CELL + GAP) + NODE_GAP
    nodes_in_row = max(1, WIDTH // node_width)
    num_nodes = -(-view.world_size // gpus_per_node)
    pieces = []
    for node in range(num_nodes):
        row, column = divmod(node, nodes_in_row)
        left, top = column * node_width, row * node_height
        pieces.append(
            Markup('<text x="{}" y="{}" font-size="9.5" fill="#6b7685">node {}</text>').format(left, top + 11, node)
        )
        for place, rank in enumerate(range(node * gpus_per_node, min((node + 1) * gpus_per_node, view.world_size))):
            y, x = divmod(place, in_row)
            title = f"rank {rank}: " + ", ".join(f"{a} {drawn.coordinate(rank, a)}" for a in groups)
            marks = Markup(" ").join(Markup('data-{}="{}"').format(axis, groups[axis][rank]) for axis in groups)
            pieces.append(
                Markup(
                    '<rect class="gpu" x="{}" y="{}" width="{}" height="{}" rx="2" {}><title>{}</title></rect>'
                ).format(left + x * (CELL + GAP), top + HEAD + y * (CELL + GAP), CELL, CELL, marks, title)
            )
    height = -(-num_nodes // nodes_in_row) * node_height
    return Markup('<svg data-view="{}" viewBox="0 0 {} {}" width="{}" role="img">{}</svg>').format(
        name, WIDTH, height, WIDTH, Markup("").join(pieces)
    )


def axis_choices(drawn: DrawnView) -> tuple[list[tuple[str, int]], str]:
    """The axes of a view with their degrees, and the axis that is shown first: ep, or the fastest that cuts."""
    axes = [(axis, drawn.degree(axis)) for axis in drawn.spans]
    cutting = [axis for axis, degree in axes if degree > 1]
    return axes, "ep" if "ep" in cutting else (cutting or [axes[-1][0]])[-1]
