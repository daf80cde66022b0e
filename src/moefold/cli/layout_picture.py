"""The two views of a layout as a picture: one card a rank, one band an axis, one colour a group; then the stages."""

import colorsys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from moefold.cli.layout_stages_picture import StagePanel
from moefold.cli.layout_table import named_views, nodes
from moefold.config.schema import Config
from moefold.errors import ConfigError
from moefold.parallel.layout import Layout, View
from moefold.parallel.stage_plan import StagePlan

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FORMATS = (".png", ".svg", ".pdf")
MAX_RANKS = 256
COLUMNS = 8
STACK_ROWS = 2
PITCH = 1.12
CARD = 1.0
BAND = 0.27
HEAD = 0.36
NODE_GAP = 0.52
MARGIN = 0.3
TITLE = 1.0
DPI = 160
INK, FAINT, PAPER, TRAY, BLANK = "#1c2430", "#7a8594", "#ffffff", "#eef1f5", "#f3f4f6"
AXIS_MEANING = {
    "tp": "tensor",
    "cp": "context",
    "dp": "data",
    "pp": "pipeline",
    "etp": "expert tensor",
    "ep": "expert",
    "edp": "expert data",
}


def save_picture(
    layout: Layout, gpus_per_node: int, path: Path, plan: StagePlan | None = None, cfg: Config | None = None
) -> None:
    """Draw both views of a layout into a .png, .svg or .pdf file, and below them the pipeline stages.

    Args:
        layout: the two views.
        gpus_per_node: ranks of one node.
        path: of the file.
        plan: the stages; None draws none.
        cfg: the recipe, if there is one: then the stages show what they cost.

    Raises:
        ConfigError: the ending is another one, the file cannot be written, or the ranks are too many for a picture.
    """
    if path.suffix.lower() not in FORMATS:
        raise ConfigError(f"--png {path} must end in .png, .svg or .pdf")
    if layout.world_size > MAX_RANKS:
        raise ConfigError(
            f"world_size={layout.world_size} must be at most {MAX_RANKS} for a picture, which has one card a rank; "
            f"use --json, or draw one part of the machine"
        )
    # The figure is made without pyplot, which would pick a display and keep every figure alive.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    cards = _Plan.of(layout, gpus_per_node)
    stacked = cards.num_rows <= STACK_ROWS
    width = cards.width if stacked else 2 * cards.width + MARGIN
    views_height = 2 * cards.height if stacked else cards.height
    panel = None if plan is None else StagePanel(plan, cfg, width)
    below = 0.0
    if panel is not None:
        width, below = max(width, panel.least_width), panel.height
    height = views_height + below
    figure = Figure(figsize=(width, height), dpi=DPI, facecolor=PAPER)
    FigureCanvasAgg(figure)

    def axes_of(left: float, bottom: float, size: tuple[float, float]) -> "Axes":
        axes = figure.add_axes((left / width, bottom / height, size[0] / width, size[1] / height))
        axes.set(xlim=(0, size[0]), ylim=(size[1], 0))
        axes.axis("off")
        return axes

    for index, (name, view) in enumerate(named_views(layout)):
        left = 0.0 if stacked else index * (cards.width + MARGIN)
        bottom = below + ((1 - index) * cards.height if stacked else 0.0)
        _draw_view(axes_of(left, bottom, (cards.width, cards.height)), cards, name, view)
    if panel is not None:
        panel.draw(axes_of(0.0, 0.0, (width, below)))
    try:
        figure.savefig(path)
    except OSError as error:
        raise ConfigError(f"--png {path} cannot be written: {error.strerror}") from None


@dataclass(frozen=True)
class _Plan:
    """Where the cards of one view stand, in inches from the upper left corner of its panel."""

    on_nodes: list[range]
    columns: int
    nodes_per_row: int
    num_rows: int
    node_width: float
    node_height: float
    card_height: float

    @classmethod
    def of(cls, layout: Layout, gpus_per_node: int) -> "_Plan":
        on_nodes = nodes(layout.world_size, gpus_per_node)
        columns = min(len(on_nodes[0]), COLUMNS)
        num_bands = max(len(_split_axes(view)) for _, view in named_views(layout))
        card_height = HEAD + BAND * num_bands + 0.06
        node_width = columns * PITCH - (PITCH - CARD) + 2 * 0.14 + 0.2
        node_height = NODE_GAP + -(-len(on_nodes[0]) // columns) * (card_height + PITCH - CARD)
        nodes_per_row = max(1, COLUMNS // columns)
        while nodes_per_row < len(on_nodes) and -(-len(on_nodes) // nodes_per_row) * node_height > 2 * (
            nodes_per_row * node_width
        ):
            nodes_per_row += 1
        nodes_per_row = min(nodes_per_row, len(on_nodes))
        num_rows = -(-len(on_nodes) // nodes_per_row)
        return cls(on_nodes, columns, nodes_per_row, num_rows, node_width, node_height, card_height)

    @property
    def width(self) -> float:
        """Width of one panel, wide enough for its title."""
        return max(2 * MARGIN + self.nodes_per_row * self.node_width - 0.2, 6.4)

    @property
    def height(self) -> float:
        """Height of one panel."""
        return TITLE + self.num_rows * self.node_height + 0.1

    def node_corner(self, node: int) -> tuple[float, float]:
        """Upper left corner of a node's tray."""
        row, column = divmod(node, self.nodes_per_row)
        return MARGIN + column * self.node_width, TITLE + row * self.node_height

    def cards(self) -> Iterator[tuple[int, float, float]]:
        """Each rank with the upper left corner of its card."""
        for node, ranks in enumerate(self.on_nodes):
            left, top = self.node_corner(node)
            for i, rank in enumerate(ranks):
                row, column = divmod(i, self.columns)
                yield rank, left + 0.14 + column * PITCH, top + 0.3 + row * (self.card_height + PITCH - CARD)


def _split_axes(view: View) -> list[str]:
    """The axes that cut anything, slowest first."""
    return [axis for axis, degree in zip(view.axes, view.degrees, strict=True) if degree > 1]


def _draw_view(axes: "Axes", plan: _Plan, name: str, view: View) -> None:
    factors = " × ".join(f"{axis} {degree}" for axis, degree in zip(view.axes, view.degrees, strict=True))
    axes.text(MARGIN, 0.36, name, fontsize=17, fontweight="bold", color=INK, va="center")
    axes.text(plan.width - MARGIN, 0.36, factors, fontsize=13, color=INK, va="center", ha="right", family="monospace")
    meaning = ", ".join(f"{axis} {AXIS_MEANING[axis]}" for axis in _split_axes(view))
    note = (
        f"one colour in a band is one group, the number is the place in it ({meaning})"
        if meaning
        else "every rank is a group by itself"
    )
    axes.text(MARGIN, 0.72, note, fontsize=9.5, color=FAINT, va="center")
    for node, ranks in enumerate(plan.on_nodes):
        _draw_tray(axes, plan, node, len(ranks))
    bands = [(axis, view.group_indices(axis)) for axis in _split_axes(view)]
    for rank, left, top in plan.cards():
        _draw_box(axes, (left, top, CARD, plan.card_height), PAPER, "#c9d0da", 0.09)
        axes.text(left + 0.1, top + HEAD / 2 + 0.01, "rank", fontsize=7.5, color=FAINT, va="center")
        axes.text(
            left + CARD - 0.1,
            top + HEAD / 2,
            str(rank),
            fontsize=13,
            fontweight="bold",
            color=INK,
            va="center",
            ha="right",
        )
        height = (plan.card_height - HEAD - 0.06) / max(1, len(bands))
        for i, (axis, indices) in enumerate(bands):
            box = (left + 0.06, top + HEAD + i * height + 0.015, CARD - 0.12, height - 0.03)
            _draw_box(axes, box, _colour(view, axis, indices[rank]), "none", 0.05)
            middle = box[1] + box[3] / 2
            axes.text(left + 0.14, middle, axis, fontsize=9, color=INK, va="center_baseline")
            place = str(view.coordinate(rank, axis))
            axes.text(left + CARD - 0.14, middle, place, fontsize=9, color=INK, va="center_baseline", ha="right")


def _draw_tray(axes: "Axes", plan: _Plan, node: int, num_ranks: int) -> None:
    left, top = plan.node_corner(node)
    height = plan.node_height - NODE_GAP + 0.36
    width = min(num_ranks, plan.columns) * PITCH - (PITCH - CARD) + 0.28
    _draw_box(axes, (left, top, width, height), TRAY, "none", 0.12)
    axes.text(left + 0.16, top + 0.16, f"node {node}", fontsize=8.5, color=FAINT, va="center")


def _draw_box(axes: "Axes", box: tuple[float, float, float, float], fill: str, edge: str, radius: float) -> None:
    from matplotlib.patches import FancyBboxPatch

    left, top, width, height = box
    style = f"round,pad=0,rounding_size={radius}"
    axes.add_patch(
        FancyBboxPatch((left, top), width, height, boxstyle=style, facecolor=fill, edgecolor=edge, linewidth=0.8)
    )


def _colour(view: View, axis: str, group: int) -> str:
    """A light colour of a group: an axis runs round the wheel once, and many neighbours also differ in lightness."""
    num_groups = view.world_size // view.degree(axis)
    hue = (0.56 + group / num_groups) % 1
    lightness = 0.84 if num_groups <= COLUMNS else (0.87, 0.80)[group % 2]
    red, green, blue = colorsys.hls_to_rgb(hue, lightness, 0.70)
    return f"#{round(red * 255):02x}{round(green * 255):02x}{round(blue * 255):02x}"
