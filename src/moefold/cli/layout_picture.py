"""Picture of a layout's views, with and without folding: one card per rank, one band per axis; then the stages."""

import colorsys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Any

from moefold.cli.layout_stages_picture import StagePanel
from moefold.cli.layout_table import describe_changes, format_count, named_views, node_ranks, unfolded_experts
from moefold.config.schema import Config
from moefold.errors import ConfigError
from moefold.planner.svg_chart import DrawnView
from moefold.topology.layout import Layout, View
from moefold.topology.stages import StagePlan

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FORMATS = (".png", ".svg", ".pdf")
MAX_RANKS = 256
COLUMNS = 8
MAX_STACKED_ROWS = 2
CARD_PITCH = 1.12
CARD_SIZE = 1.0
BAND_HEIGHT = 0.27
CARD_HEAD_HEIGHT = 0.36
NODE_GAP = 0.52
MARGIN = 0.3
TITLE_HEIGHT = 1.0
HEADING_HEIGHT = 1.0
"""Inches of a heading with one line of text."""
LINE_HEIGHT = 0.26
"""Inches of each additional line."""
CHAR_WIDTH = 0.092
"""Inches of a letter."""
MIN_LARGE_RANKS = 32
DPI = 160
LARGE_DPI = 110
"""Dots per inch of pictures with more than `MIN_LARGE_RANKS` ranks."""
MAX_HUE_ONLY_GROUPS = 4
"""Groups of a stage that hue alone tells apart; more groups differ in lightness too."""
STAGE_HUE_SHARE = 0.7
"""Fraction of a stage's share of the colour wheel that its groups use."""
INK = "#1c2430"
FAINT = "#7a8594"
PAPER = "#ffffff"
TRAY = "#eef1f5"
BLANK = "#f3f4f6"
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
    """Draw both views of a layout, the experts without folding and the stages into a .png, .svg or .pdf file.

    Args:
        layout: the two views.
        gpus_per_node: ranks per node.
        path: output file.
        plan: the pipeline stages; None draws none.
        cfg: the recipe, if there is one; the stages then show their cost.

    Raises:
        ConfigError: the file has another suffix or cannot be written, or there are too many ranks for a picture.
    """
    if path.suffix.lower() not in FORMATS:
        raise ConfigError(f"--png {path} must end in .png, .svg or .pdf")
    if layout.world_size > MAX_RANKS:
        raise ConfigError(
            f"world_size={layout.world_size} must be at most {MAX_RANKS} for a picture, which has one card a rank; "
            f"use --json, or draw one part of the machine"
        )
    # Avoid pyplot, which would pick a display and keep every figure alive.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    panels, note = _panels(layout, gpus_per_node)
    cards = _CardGrid.from_layout(layout, gpus_per_node, max(len(panel.bands) for panel in panels))
    stacked = cards.num_rows <= MAX_STACKED_ROWS
    width = cards.width if stacked else len(panels) * (cards.width + MARGIN) - MARGIN
    views_height = len(panels) * cards.height if stacked else cards.height
    stages = None if plan is None else StagePanel(plan, cfg, width)
    stages_height = 0.0
    if stages is not None:
        width = max(width, stages.min_width)
        stages_height = stages.height
    lines = wrap(note, int((width - 2 * MARGIN) / CHAR_WIDTH))
    heading = HEADING_HEIGHT + LINE_HEIGHT * max(0, len(lines) - 1)
    height = heading + views_height + stages_height
    figure = Figure(
        figsize=(width, height), dpi=LARGE_DPI if layout.world_size > MIN_LARGE_RANKS else DPI, facecolor=PAPER
    )
    FigureCanvasAgg(figure)

    def axes_of(left: float, top: float, size: tuple[float, float]) -> "Axes":
        bottom = height - top - size[1]
        axes = figure.add_axes((left / width, bottom / height, size[0] / width, size[1] / height))
        axes.set(xlim=(0, size[0]), ylim=(size[1], 0))
        axes.axis("off")
        return axes

    _draw_heading(axes_of(0.0, 0.0, (width, heading)), _title(layout, cards, cfg), lines)
    for index, panel in enumerate(panels):
        left = 0.0 if stacked else index * (cards.width + MARGIN)
        top = heading + (index * cards.height if stacked else 0.0)
        _draw_view(axes_of(left, top, (cards.width, cards.height)), cards, panel)
    if stages is not None:
        stages.draw(axes_of(0.0, heading + views_height, (width, stages_height)))
    try:
        figure.savefig(path)
    except OSError as error:
        raise ConfigError(f"--png {path} cannot be written: {error.strerror}") from None


@dataclass(frozen=True)
class _Band:
    """Band of the cards: one axis of a view."""

    axis: str
    groups: tuple[int, ...]
    """Group of each rank."""
    group_ranks: tuple[int, ...]
    """Index of each rank in its group."""


@dataclass(frozen=True)
class _Panel:
    """Drawing data of one view."""

    name: str
    factors: str
    bands: tuple[_Band, ...]
    stages: tuple[int, ...]
    """Pipeline stage of each rank."""
    pp: int


def _panels(layout: Layout, gpus_per_node: int) -> tuple[list[_Panel], str]:
    """Return the attention view, the expert view, and the unfolded expert view if it differs; and a note on folding."""
    stages = tuple(layout.attention.coordinate(rank, "pp") for rank in range(layout.world_size))
    unfolded = unfolded_experts(layout)
    views: list[tuple[str, View | DrawnView]] = list(named_views(layout))
    if unfolded is not None:
        views[1] = ("experts, folded", views[1][1])
        views.append(("experts without folding", unfolded))
    panels = []
    for name, view in views:
        axes = view.axes if isinstance(view, View) else tuple(view.parts_of_axis)
        bands = tuple(
            _Band(axis, view.group_indices(axis), tuple(view.coordinate(r, axis) for r in range(layout.world_size)))
            for axis in axes
            if view.degree(axis) > 1
        )
        factors = " × ".join(f"{axis} {view.degree(axis)}" for axis in axes)
        panels.append(_Panel(name, factors, bands, stages, layout.pp))
    if unfolded is None:
        return panels, ""
    return panels, "What folding changes: " + "; ".join(describe_changes(layout, unfolded, gpus_per_node)) + "."


def _title(layout: Layout, grid: "_CardGrid", cfg: Config | None) -> str:
    name = "" if cfg is None else f"{cfg.model.preset or 'the model'} on "
    return f"{name}{format_count(layout.world_size, 'rank')}, {format_count(len(grid.ranks_by_node), 'node')}"


def _draw_heading(axes: "Axes", title: str, lines: Sequence[str]) -> None:
    axes.text(MARGIN, 0.4, title, fontsize=19, fontweight="bold", color=INK, va="center")
    for i, line in enumerate(lines):
        axes.text(MARGIN, 0.8 + LINE_HEIGHT * i, line, fontsize=10.5, color=INK, va="center")


@dataclass(frozen=True)
class _CardGrid:
    """Positions of the cards of one view, in inches from the upper left corner of its panel."""

    ranks_by_node: list[range]
    columns: int
    nodes_per_row: int
    num_rows: int
    node_width: float
    node_height: float
    card_height: float

    @classmethod
    def from_layout(cls, layout: Layout, gpus_per_node: int, num_bands: int) -> "_CardGrid":
        on_nodes = node_ranks(layout.world_size, gpus_per_node)
        columns = min(len(on_nodes[0]), COLUMNS)
        card_height = CARD_HEAD_HEIGHT + BAND_HEIGHT * num_bands + 0.06
        node_width = columns * CARD_PITCH - (CARD_PITCH - CARD_SIZE) + 2 * 0.14 + 0.2
        node_height = NODE_GAP + -(-len(on_nodes[0]) // columns) * (card_height + CARD_PITCH - CARD_SIZE)
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
        return TITLE_HEIGHT + self.num_rows * self.node_height + 0.1

    def node_corner(self, node: int) -> tuple[float, float]:
        """Return the upper left corner of a node's tray."""
        row, column = divmod(node, self.nodes_per_row)
        return MARGIN + column * self.node_width, TITLE_HEIGHT + row * self.node_height

    def cards(self) -> Iterator[tuple[int, float, float]]:
        """Yield each rank with the upper left corner of its card."""
        for node, ranks in enumerate(self.ranks_by_node):
            left, top = self.node_corner(node)
            for i, rank in enumerate(ranks):
                row, column = divmod(i, self.columns)
                yield (
                    rank,
                    left + 0.14 + column * CARD_PITCH,
                    top + 0.3 + row * (self.card_height + CARD_PITCH - CARD_SIZE),
                )


def _draw_view(axes: "Axes", grid: _CardGrid, panel: _Panel) -> None:
    axes.text(MARGIN, 0.36, panel.name, fontsize=15, fontweight="bold", color=INK, va="center")
    right = grid.width - MARGIN
    axes.text(right, 0.36, panel.factors, fontsize=12, color=INK, va="center", ha="right", family="monospace")
    meaning = ", ".join(f"{band.axis} {AXIS_MEANING[band.axis]}" for band in panel.bands)
    note = f"one colour is one group, a stage one family; the number is the rank in the group ({meaning})"
    axes.text(
        MARGIN, 0.72, note if meaning else "every rank is a group by itself", fontsize=9, color=FAINT, va="center"
    )
    for node, ranks in enumerate(grid.ranks_by_node):
        _draw_tray(axes, grid, node, len(ranks))
    colours = [_colours(panel, band) for band in panel.bands]
    for rank, left, top in grid.cards():
        _draw_box(axes, (left, top, CARD_SIZE, grid.card_height), PAPER, "#c9d0da", 0.09)
        axes.text(left + 0.1, top + CARD_HEAD_HEIGHT / 2 + 0.01, "rank", fontsize=7.5, color=FAINT, va="center")
        bold: dict[str, Any] = {"fontsize": 13, "fontweight": "bold", "color": INK, "va": "center", "ha": "right"}
        axes.text(left + CARD_SIZE - 0.1, top + CARD_HEAD_HEIGHT / 2, str(rank), **bold)
        height = (grid.card_height - CARD_HEAD_HEIGHT - 0.06) / max(1, len(panel.bands))
        for i, band in enumerate(panel.bands):
            box = (left + 0.06, top + CARD_HEAD_HEIGHT + i * height + 0.015, CARD_SIZE - 0.12, height - 0.03)
            _draw_box(axes, box, colours[i][rank], "none", 0.05)
            middle = box[1] + box[3] / 2
            axes.text(left + 0.14, middle, band.axis, fontsize=9, color=INK, va="center_baseline")
            place = str(band.group_ranks[rank])
            axes.text(left + CARD_SIZE - 0.14, middle, place, fontsize=9, color=INK, va="center_baseline", ha="right")


def _draw_tray(axes: "Axes", grid: _CardGrid, node: int, num_ranks: int) -> None:
    left, top = grid.node_corner(node)
    height = grid.node_height - NODE_GAP + 0.36
    width = min(num_ranks, grid.columns) * CARD_PITCH - (CARD_PITCH - CARD_SIZE) + 0.28
    _draw_box(axes, (left, top, width, height), TRAY, "none", 0.12)
    axes.text(left + 0.16, top + 0.16, f"node {node}", fontsize=8.5, color=FAINT, va="center")


def _draw_box(axes: "Axes", box: tuple[float, float, float, float], fill: str, edge: str, radius: float) -> None:
    from matplotlib.patches import FancyBboxPatch

    left, top, width, height = box
    style = f"round,pad=0,rounding_size={radius}"
    axes.add_patch(
        FancyBboxPatch((left, top), width, height, boxstyle=style, facecolor=fill, edgecolor=edge, linewidth=0.8)
    )


def _colours(panel: _Panel, band: _Band) -> list[str]:
    """Return the colour of a band on each rank: a colour family for each stage, one colour for each group."""
    if band.axis == "pp":
        return [_shade((stage + STAGE_HUE_SHARE / 2) / panel.pp, 0.74) for stage in panel.stages]
    members: list[list[int]] = [
        sorted({group for group, at in zip(band.groups, panel.stages, strict=True) if at == stage})
        for stage in range(panel.pp)
    ]
    colours = []
    for group, stage in zip(band.groups, panel.stages, strict=True):
        place = members[stage].index(group)
        num_groups = len(members[stage])
        lightness = 0.84 if num_groups <= MAX_HUE_ONLY_GROUPS else (0.88, 0.72, 0.80)[place % 3]
        colours.append(_shade((stage + STAGE_HUE_SHARE * (place + 0.5) / num_groups) / panel.pp, lightness))
    return colours


def _shade(hue: float, lightness: float) -> str:
    red, green, blue = colorsys.hls_to_rgb((0.56 + hue) % 1, lightness, 0.68)
    return f"#{round(red * 255):02x}{round(green * 255):02x}{round(blue * 255):02x}"
