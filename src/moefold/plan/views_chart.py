"""The two views over the nodes as SVG: a cell for each GPU, coloured by its group along a chosen axis."""

from markupsafe import Markup

from moefold.parallel.layout import Layout, View

CELL, GAP, NODE_GAP, HEAD = 15, 2, 12, 16
WIDTH = 560
WHEEL = 0.61803
"""Neighbouring groups are so much of the colour wheel apart."""


def view_chart(name: str, view: View, gpus_per_node: int) -> Markup:
    """One view: nodes with their GPUs, each of which knows its group along every axis.

    Args:
        name: of the view, for the script that colours it.
        view: the view.
        gpus_per_node: cells of a node, in rows of 8.
    """
    groups = {axis: view.group_indices(axis) for axis in view.axes}
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
            title = f"rank {rank}: " + ", ".join(f"{a} {view.coordinate(rank, a)}" for a in view.axes)
            marks = Markup(" ").join(Markup('data-{}="{}"').format(axis, groups[axis][rank]) for axis in view.axes)
            pieces.append(
                Markup(
                    '<rect class="gpu" x="{}" y="{}" width="{}" height="{}" rx="2" {}><title>{}</title></rect>'
                ).format(left + x * (CELL + GAP), top + HEAD + y * (CELL + GAP), CELL, CELL, marks, title)
            )
    height = -(-num_nodes // nodes_in_row) * node_height
    return Markup('<svg data-view="{}" viewBox="0 0 {} {}" width="{}" role="img">{}</svg>').format(
        name, WIDTH, height, WIDTH, Markup("").join(pieces)
    )


def axis_choices(layout: Layout) -> tuple[tuple[str, View, list[tuple[str, int]], str], ...]:
    """Both views with their axes, the degrees of these, and the axis that is shown first: the fastest that cuts."""
    found = []
    for name, view in (("attention", layout.attention), ("experts", layout.moe)):
        axes = list(zip(view.axes, view.degrees, strict=True))
        cutting = [axis for axis, degree in axes if degree > 1]
        first = "ep" if "ep" in cutting else (cutting or [axes[-1][0]])[-1]
        found.append((name, view, axes, first))
    return tuple(found)
