"""Views of a layout with the axes that are shown."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from moefold.topology.layout import Layout, View


@dataclass(frozen=True)
class DrawnView:
    """A view with its display axes: a display axis may consist of several axes of the view, if others lie between."""

    view: View
    parts_of_axis: Mapping[str, tuple[str, ...]]
    """By display axis, slowest to fastest, the axes of the view that form it."""

    def degree(self, axis: str) -> int:
        """Return the size of one axis."""
        return prod(self.view.degree(part) for part in self.parts_of_axis[axis])

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
