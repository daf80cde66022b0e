"""Picture of a layout: one card per rank, with and without folding, then the pipeline stages."""

import colorsys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Any

from moefold.cli.layout_table import (
    DrawnView,
    build_drawn_views,
    compact_count,
    describe_changes,
    describe_stage,
    format_count,
    node_ranks,
    unfolded_experts,
)
from moefold.config.model import ModelConfig
from moefold.cost.stage_balance import StageCost
from moefold.errors import ConfigError
from moefold.host.output_file import PICTURE_SUFFIXES, check_output_path
from moefold.topology.layout import Layout
from moefold.topology.pipeline_layout import Stage, StagePlan

if TYPE_CHECKING:
    from matplotlib.figure import Figure


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
"""Height in inches of a heading with one line of text."""
LINE_HEIGHT = 0.26
"""Height in inches of each additional line."""
CHAR_WIDTH = 0.092
"""Width in inches of a letter."""
NOTE_CHAR_WIDTH = 0.076
"""Width in inches of a letter of the note on a view."""
MIN_LARGE_RANKS = 32
DPI = 160
LARGE_DPI = 110
"""Dots per inch of pictures with more than `MIN_LARGE_RANKS` ranks."""
MAX_HUE_ONLY_GROUPS = 4
"""Maximum number of groups of a stage that differ only in hue. More groups differ in lightness too."""
STAGE_HUE_SHARE = 0.7
"""Fraction of a stage's share of the colour wheel that its groups use."""
INK = "#1c2430"
FAINT = "#7a8594"
PAPER = "#ffffff"
TRAY = "#eef1f5"
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
    layout: Layout,
    gpus_per_node: int,
    path: Path,
    plan: StagePlan | None = None,
    model: ModelConfig | None = None,
    costs: Sequence[StageCost] | None = None,
) -> None:
    """Draw both views of a layout, the experts without folding and the stages into a .png, .svg or .pdf file."""
    check_output_path("--picture", path, PICTURE_SUFFIXES)
    if layout.world_size > MAX_RANKS:
        raise ConfigError(
            f"world_size={layout.world_size} must be at most {MAX_RANKS} for a picture, which has one card a rank; "
            f"use --json, or draw one part of the machine"
        )
    # Avoid pyplot, which would pick a display and keep every figure alive.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    views, note = _views(layout, gpus_per_node)
    cards = _CardGrid.from_layout(layout, gpus_per_node, max(len(_bands(view)) for view in views.values()))
    stacked = cards.num_rows <= MAX_STACKED_ROWS
    width = cards.width if stacked else len(views) * (cards.width + MARGIN) - MARGIN
    views_height = len(views) * cards.height if stacked else cards.height
    stages_height = 0.0
    if plan is not None:
        width = max(width, 2 * STAGES_MARGIN + _stage_width(costs))
        stages_height = STAGES_HEAD_HEIGHT + len(plan.stages) * STAGE_ROW_HEIGHT + STAGES_MARGIN
    lines = wrap(note, int((width - 2 * MARGIN) / CHAR_WIDTH))
    heading = HEADING_HEIGHT + LINE_HEIGHT * max(0, len(lines) - 1)
    height = heading + views_height + stages_height
    figure = Figure(
        figsize=(width, height), dpi=LARGE_DPI if layout.world_size > MIN_LARGE_RANKS else DPI, facecolor=PAPER
    )
    FigureCanvasAgg(figure)
    title = _Canvas(figure, (width, height), (0.0, 0.0, width, heading))
    name = "" if model is None else f"{model.preset or 'the model'} on "
    machine = f"{format_count(layout.world_size, 'rank')}, {format_count(len(cards.ranks_by_node), 'node')}"
    title.text(MARGIN, 0.4, f"{name}{machine}", 19, fontweight="bold")
    for i, line in enumerate(lines):
        title.text(MARGIN, 0.8 + LINE_HEIGHT * i, line, 10.5)
    for index, (name, view) in enumerate(views.items()):
        left = 0.0 if stacked else index * (cards.width + MARGIN)
        top = heading + (index * cards.height if stacked else 0.0)
        _draw_view(_Canvas(figure, (width, height), (left, top, cards.width, cards.height)), cards, name, view, layout)
    if plan is not None:
        box = (0.0, heading + views_height, width, stages_height)
        _draw_stages(_Canvas(figure, (width, height), box), plan, model, costs)
    try:
        figure.savefig(path)
    except OSError as error:
        raise ConfigError(f"--picture {path} cannot be written: {error.strerror}") from None


class _Canvas:
    """Part of a figure of some size: left, top, width and height in inches from the upper left corner."""

    def __init__(self, figure: "Figure", size: tuple[float, float], box: tuple[float, float, float, float]) -> None:
        left, top, width, height = box
        bottom = size[1] - top - height
        self._axes = figure.add_axes((left / size[0], bottom / size[1], width / size[0], height / size[1]))
        self._axes.set(xlim=(0, width), ylim=(height, 0))
        self._axes.axis("off")

    def text(self, x: float, y: float, words: str, size: float, color: str = INK, **style: Any) -> None:
        """Write words whose middle has the height y."""
        self._axes.text(x, y, words, fontsize=size, color=color, **{"va": "center", **style})

    def box(self, box: tuple[float, float, float, float], fill: str, radius: float = 0.0, edge: str = "none") -> None:
        """Draw a rectangle, with round corners if it has a radius."""
        from matplotlib.patches import FancyBboxPatch, Rectangle

        left, top, width, height = box
        if not radius:
            self._axes.add_patch(Rectangle((left, top), width, height, facecolor=fill, edgecolor=edge))
            return
        style = f"round,pad=0,rounding_size={radius}"
        self._axes.add_patch(
            FancyBboxPatch((left, top), width, height, boxstyle=style, facecolor=fill, edgecolor=edge, linewidth=0.8)
        )


def _views(layout: Layout, gpus_per_node: int) -> tuple[dict[str, DrawnView], str]:
    """Return the attention view, the expert view, the unfolded expert view if it differs, and a note on folding."""
    attention, experts = build_drawn_views(layout)
    unfolded = unfolded_experts(layout)
    if unfolded is None:
        return {"attention": attention, "experts": experts}, ""
    views = {"attention": attention, "experts, folded": experts, "experts without folding": unfolded}
    return views, "What folding changes: " + "; ".join(describe_changes(layout, unfolded, gpus_per_node)) + "."


def _bands(view: DrawnView) -> list[str]:
    """Return the axes that have a band on the cards."""
    return [axis for axis in view.parts_of_axis if view.degree(axis) > 1]


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


def _draw_view(canvas: _Canvas, grid: _CardGrid, name: str, view: DrawnView, layout: Layout) -> None:
    bands = _bands(view)
    canvas.text(MARGIN, 0.36, name, 15, fontweight="bold")
    right = grid.width - MARGIN
    factors = " × ".join(f"{axis} {view.degree(axis)}" for axis in view.parts_of_axis)
    canvas.text(right, 0.36, factors, 12, ha="right", family="monospace")
    meaning = ", ".join(f"{axis} {AXIS_MEANING[axis]}" for axis in bands)
    family = ", a stage one family" * (layout.pp > 1)
    note = f"one colour is one group{family}; the number is the rank in it ({meaning})"
    lines = wrap(note if meaning else "every rank is a group by itself", int((right - MARGIN) / NOTE_CHAR_WIDTH))
    canvas.text(MARGIN, 0.72, "\n".join(lines), 9, FAINT, linespacing=1.25)
    for node, ranks in enumerate(grid.ranks_by_node):
        left, top = grid.node_corner(node)
        width = min(len(ranks), grid.columns) * CARD_PITCH - (CARD_PITCH - CARD_SIZE) + 0.28
        canvas.box((left, top, width, grid.node_height - NODE_GAP + 0.36), TRAY, 0.12)
        canvas.text(left + 0.16, top + 0.16, f"node {node}", 8.5, FAINT)
    colours = {axis: _colours(view, axis, layout) for axis in bands}
    for rank, left, top in grid.cards():
        canvas.box((left, top, CARD_SIZE, grid.card_height), PAPER, 0.09, "#c9d0da")
        canvas.text(left + 0.1, top + CARD_HEAD_HEIGHT / 2 + 0.01, "rank", 7.5, FAINT)
        canvas.text(left + CARD_SIZE - 0.1, top + CARD_HEAD_HEIGHT / 2, str(rank), 13, fontweight="bold", ha="right")
        height = (grid.card_height - CARD_HEAD_HEIGHT - 0.06) / max(1, len(bands))
        for i, axis in enumerate(bands):
            box = (left + 0.06, top + CARD_HEAD_HEIGHT + i * height + 0.015, CARD_SIZE - 0.12, height - 0.03)
            canvas.box(box, colours[axis][rank], 0.05)
            middle = box[1] + box[3] / 2
            canvas.text(left + 0.14, middle, axis, 9, va="center_baseline")
            place = str(view.coordinate(rank, axis))
            canvas.text(left + CARD_SIZE - 0.14, middle, place, 9, va="center_baseline", ha="right")


def _colours(view: DrawnView, axis: str, layout: Layout) -> list[str]:
    """Return the colour of a band on each rank: a colour family for each stage, one colour for each group."""
    stages = [layout.attention.coordinate(rank, "pp") for rank in range(layout.world_size)]
    if axis == "pp":
        return [_shade((stage + STAGE_HUE_SHARE / 2) / layout.pp, 0.74) for stage in stages]
    groups = view.group_indices(axis)
    members = [
        sorted({group for group, s in zip(groups, stages, strict=True) if s == stage}) for stage in range(layout.pp)
    ]
    colours = []
    for group, stage in zip(groups, stages, strict=True):
        place = members[stage].index(group)
        num_groups = len(members[stage])
        lightness = 0.84 if num_groups <= MAX_HUE_ONLY_GROUPS else (0.88, 0.72, 0.80)[place % 3]
        colours.append(_shade((stage + STAGE_HUE_SHARE * (place + 0.5) / num_groups) / layout.pp, lightness))
    return colours


def _shade(hue: float, lightness: float) -> str:
    red, green, blue = colorsys.hls_to_rgb((0.56 + hue) % 1, lightness, 0.68)
    return f"#{round(red * 255):02x}{round(green * 255):02x}{round(blue * 255):02x}"


STAGE_ROW_HEIGHT = 0.36
STAGES_HEAD_HEIGHT = 1.45
STAGES_MARGIN = 0.3
NAMES_WIDTH = 1.75
UNITS_WIDTH = 3.6
BARS_WIDTH = 2.05
BAR_TEXT_WIDTH = 0.62
MAX_UNIT_WIDTH = 0.34
MIN_NUMBERED_UNIT_WIDTH = 0.2
MAX_LAYOUT_CHARS = 110
FLOPS_BAR_COLOR = "#5b7fb5"
WEIGHT_BAR_COLOR = "#8a9a5b"
UNIT_COLORS = {
    "E": ("#cfe0f7", "embedding"),
    "t": ("#e3e6eb", "layer"),
    "D": ("#dcebd3", "dense layer"),
    "M": ("#fbe0c3", "MoE layer"),
    "m": ("#e3d3f2", "multi-token prediction"),
    "L": ("#f7cfd2", "head and loss"),
}


def _stage_width(costs: Sequence[StageCost] | None) -> float:
    """Return the width in inches of a row with a stage."""
    return NAMES_WIDTH + UNITS_WIDTH + (0 if costs is None else 2 * BARS_WIDTH)


def _draw_stages(
    canvas: _Canvas, plan: StagePlan, model: ModelConfig | None, costs: Sequence[StageCost] | None
) -> None:
    """Draw a row for each stage: its layers, with their kinds for a given model, and with their costs if given."""
    text = plan.layout
    layout_text = text if len(text) <= MAX_LAYOUT_CHARS else f"{text[:MAX_LAYOUT_CHARS]}..."
    canvas.text(STAGES_MARGIN, 0.36, "pipeline stages", 17, fontweight="bold")
    canvas.text(STAGES_MARGIN, 0.72, layout_text, 10, family="monospace")
    units = [list(_units(stage, model)) for stage in plan.stages]
    left = STAGES_MARGIN
    for kind, (fill, meaning) in UNIT_COLORS.items():
        if any(kind == unit for stage_units in units for unit, _ in stage_units):
            canvas.box((left, 0.99, 0.18, 0.18), fill)
            canvas.text(left + 0.26, 1.08, meaning, 9.5, FAINT)
            left += 0.5 + 0.082 * len(meaning)
    left = STAGES_MARGIN + NAMES_WIDTH + UNITS_WIDTH
    if costs is not None:
        canvas.text(left, STAGES_HEAD_HEIGHT - 0.14, "FLOPs, of the busiest", 8.5, FAINT)
        canvas.text(left + BARS_WIDTH, STAGES_HEAD_HEIGHT - 0.14, "weights per rank", 8.5, FAINT)
    for i, (stage, stage_units) in enumerate(zip(plan.stages, units, strict=True)):
        top = STAGES_HEAD_HEIGHT + i * STAGE_ROW_HEIGHT
        box = (STAGES_MARGIN - 0.08, top + 0.03, _stage_width(costs) - 0.1, STAGE_ROW_HEIGHT - 0.06)
        canvas.box(box, TRAY if stage.pp_rank % 2 == 0 else "#f8f9fb")
        _draw_stage(canvas, stage, stage_units, top)
        if costs is not None:
            _draw_bars(canvas, costs, i, left, top)


def _draw_stage(canvas: _Canvas, stage: Stage, units: Sequence[tuple[str, str]], top: float) -> None:
    middle = top + STAGE_ROW_HEIGHT / 2
    canvas.text(STAGES_MARGIN, middle, f"stage {stage.index}", 10, fontweight="bold")
    canvas.text(STAGES_MARGIN + 0.86, middle, f"pp rank {stage.pp_rank}", 9, FAINT)
    left = STAGES_MARGIN + NAMES_WIDTH
    if not units:
        canvas.text(left, middle, describe_stage(stage.parts), 9, FAINT)
        return
    size = min(MAX_UNIT_WIDTH, (UNITS_WIDTH - 0.2) / len(units))
    for i, (kind, label) in enumerate(units):
        box = (left + i * size, top + 0.07, size - min(0.04, size / 5), STAGE_ROW_HEIGHT - 0.14)
        canvas.box(box, UNIT_COLORS[kind][0])
        is_end = i in (0, len(units) - 1) and size > MIN_NUMBERED_UNIT_WIDTH / 2
        if size >= MIN_NUMBERED_UNIT_WIDTH or is_end:
            canvas.text(box[0] + box[2] / 2, middle, label, 7.5, ha="center")


def _draw_bars(canvas: _Canvas, costs: Sequence[StageCost], stage: int, left: float, top: float) -> None:
    cost = costs[stage]
    flops = cost.flops / max(1, *(entry.flops for entry in costs))
    weights = cost.num_parameters / max(1, *(entry.num_parameters for entry in costs))
    bars = ((flops, f"{flops:.0%}", FLOPS_BAR_COLOR), (weights, compact_count(cost.num_parameters), WEIGHT_BAR_COLOR))
    for i, (share, label, fill) in enumerate(bars):
        start = left + i * BARS_WIDTH + BAR_TEXT_WIDTH
        canvas.text(start - 0.08, top + STAGE_ROW_HEIGHT / 2, label, 9, ha="right")
        if share > 0:
            length = share * (BARS_WIDTH - BAR_TEXT_WIDTH - 0.25)
            canvas.box((start, top + 0.12, length, STAGE_ROW_HEIGHT - 0.24), fill)


def _units(stage: Stage, model: ModelConfig | None) -> Iterator[tuple[str, str]]:
    """Yield the kind and the label of each box of a stage."""
    if stage.parts.has_embedding:
        yield "E", "E"
    for number in stage.parts.layers:
        yield "t" if model is None else "DM"[model.decoder_layers[number].ffn.is_routed], str(number)
    for _ in range(stage.parts.num_mtp_layers):
        yield "m", "m"
    if stage.parts.has_loss:
        yield "L", "L"
