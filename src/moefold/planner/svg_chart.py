"""Charts of the report: stacked bars as HTML; curves, pipeline passes and parallel views as SVG. Torch-free."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import floor, log2, log10, prod

from markupsafe import Markup, escape

from moefold.planner.simulator.timeline import Span, Timeline, choose_windows, describe_windows, intersects
from moefold.topology.layout import Layout, View

PALETTE = (
    "#1e4ba5",
    "#e1873c",
    "#00b4a5",
    "#872d0f",
    "#69b4ff",
    "#e1b42d",
    "#5a69c3",
    "#96c387",
    "#b45a00",
    "#4b96b4",
    "#8787f0",
    "#968769",
    "#005a5a",
    "#e1c3c3",
    "#5a5a87",
    "#b4e178",
    "#5a7878",
    "#00e1ff",
)
"""Any two are at least 0.07 apart in OKLab, also with protanopia or deuteranopia (tests/planner/test_svg_chart.py)."""
TIME_COLOURS = {
    "attention": PALETTE[0],
    "dense_mlp": PALETTE[10],
    "experts": PALETTE[4],
    "shared_experts": PALETTE[9],
    "router": PALETTE[14],
    "permute": PALETTE[2],
    "head": PALETTE[17],
    "recompute": PALETTE[6],
    "launch": PALETTE[11],
    "offload": PALETTE[13],
    "tp_comm": PALETTE[5],
    "cp_comm": PALETTE[15],
    "etp_comm": PALETTE[7],
    "ep_comm": PALETTE[1],
    "pp_comm": PALETTE[8],
    "dp_comm": PALETTE[3],
    "bubble": PALETTE[16],
    "optimizer": PALETTE[12],
}
"""Colours of the parts of a step: compute is blue, communication yellow to brown, the rest between."""
MEMORY_COLOURS = {
    "weights": PALETTE[0],
    "gathered": PALETTE[4],
    "gradients": PALETTE[2],
    "optimizer": PALETTE[12],
    "buffers": PALETTE[14],
    "activations": PALETTE[1],
    "dispatch": PALETTE[5],
    "logits": PALETTE[7],
    "pipeline": PALETTE[3],
    "workspace": PALETTE[11],
}
INK = "#1c2430"
FAINT = "#6b7685"
GRID = "#e3e7ec"
PASS_NAMES = {"F": "forward", "B": "backward", "I": "gradients of inputs", "W": "gradients of weights"}
PASS_COLOURS = {"F": "#7fa8d9", "B": "#8fbf8f", "I": "#a9d3a0", "W": "#e3b778"}
STEP_TAIL_NAMES = {"dp_comm": "gradients over dp", "optimizer": "optimizer"}
STEP_TAIL_COLOURS = {"dp_comm": "#c9a0c9", "optimizer": "#9a9aa8"}
EXPOSED_COLOUR = "#d0574f"
MAX_PASS_TOOLTIPS = 8000
"""Maximum number of passes with tooltips; with more, the page would be too large."""


@dataclass(frozen=True)
class Curve:
    """One line of a chart."""

    name: str
    points: tuple[tuple[float, float], ...]
    colour: str
    is_dashed: bool = False


@dataclass(frozen=True, kw_only=True)
class StackedBar:
    """One row of stacked bars."""

    name: str
    subtitle: str
    """Small text below the name."""
    parts: Mapping[str, float]
    limit_level: str = ""
    """`near` or `over` a limit, which colours the sum."""


def stacked_bars(
    bars: Sequence[StackedBar],
    unit: str,
    colours: Mapping[str, str],
    *,
    limits: Sequence[tuple[float, str]] = (),
    format_value: Callable[[float], str],
) -> Markup:
    """Draw a bar for each row, divided into parts, with a legend above and the sums to the right.

    Args:
        bars: the rows; parts of 0 are left out.
        unit: unit of the sums.
        colours: colour by part, the same in all rows.
        limits: values of vertical lines, in the unit, with their labels.
        format_value: formats an amount.
    """
    names = [name for name in colours if any(bar.parts.get(name, 0) > 0 for bar in bars)]
    largest = max([sum(bar.parts.values()) for bar in bars] + [limit for limit, _ in limits])
    legend = _legend([(colours[name], name.replace("_", " ")) for name in names])
    form = Markup('<span class="limit {}">{}</span>')
    lines = [form.format(_limit_kind(i, limits), words) for i, (_, words) in enumerate(limits)]
    rows = Markup("").join(_bar(bar, (unit, format_value), colours, largest, limits) for bar in bars)
    return Markup('<p class="legend">{}{}</p><div class="bars">{}</div>').format(legend, Markup("").join(lines), rows)


def _bar(
    bar: StackedBar,
    unit_and_format: tuple[str, Callable[[float], str]],
    colours: Mapping[str, str],
    largest: float,
    limits: Sequence[tuple[float, str]],
) -> Markup:
    unit, text = unit_and_format
    pieces = []
    for name, colour in colours.items():
        value = bar.parts.get(name, 0.0)
        if value > 0:
            title = f"{name.replace('_', ' ')}: {text(value)} {unit}"
            form = Markup('<i class="part" style="width:{:.3f}%;background:{}" title="{}"></i>')
            pieces.append(form.format(100 * value / largest, colour, title))
    for i, (limit, name) in enumerate(limits):
        form = Markup('<i class="line {}" style="left:{:.3f}%" title="{}"></i>')
        pieces.append(form.format(_limit_kind(i, limits), 100 * limit / largest, name))
    row = Markup(
        '<div class="bar"><span class="label"><code>{}</code> <small>{}</small></span>'
        '<span class="track">{}</span><span class="sum {}">{} {}</span></div>'
    )
    total = text(sum(bar.parts.values()))
    return row.format(bar.name, bar.subtitle, Markup("").join(pieces), bar.limit_level, total, unit)


def _limit_kind(i: int, limits: Sequence[tuple[float, str]]) -> str:
    """Return the style of a limit; the last one is the device's own."""
    return "hard" if i == len(limits) - 1 else "soft"


def round_ticks(top: float, max_ticks: int = 5) -> list[float]:
    """Return round numbers from 0 to the first that is not below `top`: multiples of 1, 2, 2.5 or 5 times 10**k."""
    if top <= 0:
        return [0.0, 1.0]
    size = 10.0 ** floor(log10(top / max_ticks))
    step = next(
        step for step in (size, 2 * size, 2.5 * size, 5 * size, 10 * size) if step * max_ticks >= top * (1 - 1e-9)
    )
    count = 1
    while count * step < top * (1 - 1e-9):
        count += 1
    return [i * step for i in range(count + 1)]


def line_chart(
    title: str, x_name: str, y_name: str, curves: Sequence[Curve], *, size: tuple[int, int], is_log: bool = False
) -> Markup:
    """Draw curves over a common x axis, whose ticks are the x of the points; y begins at 0.

    Args:
        title: title of the chart.
        x_name: label of the x axis.
        y_name: label of the y axis.
        curves: the curves.
        size: width and height, which scale with the page.
        is_log: whether the x axis is logarithmic.
    """
    width, height = size
    xs = sorted({x for curve in curves for x, _ in curve.points})
    ticks = round_ticks(max((y for curve in curves for _, y in curve.points), default=1.0))
    left = 58.0
    right = width - 16.0
    head = 46.0 + 17 * len(curves)
    foot = height - 42.0

    def place(x: float, y: float) -> tuple[float, float]:
        first, here, last = (log2(v) if is_log else v for v in (xs[0], x, xs[-1]))
        share = (here - first) / (last - first) if last > first else 0.5
        return left + share * (right - left), foot - (foot - head) * y / ticks[-1]

    pieces = [_text(0, 10, title, size=13.5, weight="600")]
    for y in ticks if xs else ():
        at = place(xs[0], y)[1]
        pieces.append(_line((left, at), (right, at), "grid"))
        pieces.append(_text(left - 7, at, format_si(y), size=11, kind="faint", anchor="end"))
    for x in xs:
        pieces.append(_text(place(x, 0)[0], foot + 15, f"{x:g}", size=11, kind="faint", anchor="middle"))
    pieces.append(_text((left + right) / 2, foot + 33, x_name, size=11.5, kind="faint", anchor="middle"))
    for i, curve in enumerate(curves):
        pieces += _curve(curve, [place(x, y) for x, y in curve.points], y_name)
        pieces.append(_rect((left, 25 + 17 * i, 11, 11), curve.colour, ""))
        pieces.append(_text(left + 17, 31 + 17 * i, curve.name, size=11.5, kind="faint"))
    pieces.append(_text(0, head - 14, y_name, size=11, kind="faint"))
    return _svg(width, height, pieces, title)


def _curve(curve: Curve, positions: Sequence[tuple[float, float]], y_name: str) -> list[Markup]:
    dash = Markup(' stroke-dasharray="5 4"') if curve.is_dashed else Markup("")
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in positions)
    line = Markup('<polyline class="curve" points="{}" fill="none" stroke="{}" stroke-width="2"{}/>')
    pieces = [line.format(path, curve.colour, dash)]
    for (x, y), (value, result) in zip(positions, curve.points, strict=True):
        label = f"{curve.name}: {result:.4g} {y_name} at {value:g}"
        form = Markup('<circle cx="{:.1f}" cy="{:.1f}" r="4" fill="{}"><title>{}</title></circle>')
        pieces.append(form.format(x, y, curve.colour, label))
    return pieces


def pipeline_chart(timeline: Timeline) -> Markup:
    """Draw the passes of every pipeline rank over time, with the end of the step; a long step in three windows."""
    windows = choose_windows(timeline)
    shown = [event for event in timeline.events if any(intersects((event.start_s, event.end_s), w) for w in windows)]
    kinds = {event.action.kind for event in shown if event.action is not None}
    closing = {event.part for event in shown if event.action is None}
    entries = [(PASS_COLOURS[kind], name) for kind, name in PASS_NAMES.items() if kind in kinds]
    entries += [(STEP_TAIL_COLOURS[part], name) for part, name in STEP_TAIL_NAMES.items() if part in closing]
    width = 1160.0
    lane = 26.0
    left = 78.0
    gap = 18.0
    each = (width - left - 4 - gap * (len(windows) - 1)) / len(windows)
    pieces = [
        _text(0, rank * lane + lane / 2, f"pp rank {rank}", size=12, kind="ink") for rank in range(timeline.num_ranks)
    ]
    for i, window in enumerate(windows):
        pieces += _draw_window(timeline, window, (left + i * (each + gap), each), lane)
    chart = _svg(width, timeline.num_ranks * lane + 22, pieces, "passes of each pipeline rank")
    words = describe_windows(timeline, windows)
    note = (
        Markup("<p>This shows {}; <code>--timeline step.json</code> has all of it.</p>").format(words) if words else ""
    )
    return Markup('<p class="legend">{}</p><div class="scroll wide">{}</div>{}').format(_legend(entries), chart, note)


def _draw_window(timeline: Timeline, window: Span, extent: tuple[float, float], lane: float) -> list[Markup]:
    """Draw the lanes of all ranks in a window of time, at `extent` (left, width) of the page."""
    left, width = extent
    scale = width / (window[1] - window[0])
    halved = timeline.has_overlapping_passes
    has_tooltips = sum(1 for rank in range(timeline.num_ranks) for _ in timeline.actions(rank)) <= MAX_PASS_TOOLTIPS

    def box(span: Span, y: float, height: float) -> tuple[float, float, float, float]:
        start = max(span[0], window[0])
        end = min(span[1], window[1])
        return left + (start - window[0]) * scale, y, max(0.4, (end - start) * scale - 0.3), height

    pieces = []
    for rank in range(timeline.num_ranks):
        y = rank * lane
        pieces.append(_rect((left, y + 2, width, lane - 4), "var(--tray)", ""))
        for action, span in timeline.actions(rank):
            if not intersects(span, window):
                continue
            # Where passes overlap, the forward ones have the upper half.
            low, high = (
                (2.0, lane - 2) if not halved else (2.0, lane / 2) if action.kind == "F" else (lane / 2, lane - 2)
            )
            title = f"{PASS_NAMES[action.kind]} of micro-batch {action.micro_batch}, stage {action.stage}"
            title += f": {span[0]:.4f} s to {span[1]:.4f} s"
            drawn = box(span, y + low, high - low)
            pieces.append(_rect(drawn, PASS_COLOURS[action.kind], title if has_tooltips else "", kind="pass"))
        for event in timeline.events_of(rank, "compute", "communication"):
            span = event.start_s, event.end_s
            if event.action is None and intersects(span, window):
                title = f"{STEP_TAIL_NAMES[event.part]}: {event.end_s - event.start_s:.4f} s"
                pieces.append(_rect(box(span, y + 2, lane - 4), STEP_TAIL_COLOURS[event.part], title))
    foot = timeline.num_ranks * lane
    for i, anchor in ((0, "start"), (1, "middle"), (2, "end")):
        seconds = window[0] + (window[1] - window[0]) * i / 2
        pieces.append(
            _text(left + width * i / 2, foot + 13, f"{seconds:.3g} s", size=11.5, kind="faint", anchor=anchor)
        )
    return pieces


def _legend(entries: Sequence[tuple[str, str]]) -> Markup:
    form = Markup('<span><i style="background:{}"></i>{}</span>')
    return Markup("").join(form.format(colour, name) for colour, name in entries)


def _svg(width: float, height: float, elements: Sequence[Markup], label: str) -> Markup:
    head = Markup('<svg viewBox="0 0 {:.0f} {:.0f}" role="img" aria-label="{}">').format(width, height, label)
    return head + Markup("").join(elements) + Markup("</svg>")


def _rect(box: tuple[float, float, float, float], fill: str, title: str, *, kind: str = "") -> Markup:
    inner = Markup("<title>{}</title>").format(title) if title else Markup("")
    named = Markup(' class="{}"').format(kind) if kind else Markup("")
    return Markup('<rect{} x="{:.2f}" y="{:.2f}" width="{:.2f}" height="{:.2f}" fill="{}">{}</rect>').format(
        named, *box, fill, inner
    )


def _line(start: tuple[float, float], end: tuple[float, float], kind: str) -> Markup:
    return Markup('<line x1="{:.1f}" y1="{:.1f}" x2="{:.1f}" y2="{:.1f}" class="{}"/>').format(*start, *end, kind)


def _text(
    x: float, y: float, text: str, *, size: float, kind: str = "ink", anchor: str = "start", weight: str = "normal"
) -> Markup:
    form = (
        '<text x="{:.1f}" y="{:.1f}" font-size="{}" class="{}" text-anchor="{}" font-weight="{}" '
        'dominant-baseline="central">{}</text>'
    )
    return Markup(form).format(x, y, size, kind, anchor, weight, escape(text))


def format_si(value: float) -> str:
    """Format a round number with an SI prefix, such as `250 k`."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value:.3g}"


CELL = 24
GAP = 2
HEAD = 15
SMALL_NODE_CELLS_PER_ROW = 4
"""Cells in a row of a node with up to twice as many cells; larger nodes have rows of twice as many."""


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


def view_chart(name: str, drawn: DrawnView, gpus_per_node: int) -> Markup:
    """Draw one view: nodes with their GPUs, each with its group index along every axis as attributes.

    Args:
        name: name of the view, for the script that colours and numbers the cells.
        drawn: the view.
        gpus_per_node: cells of a node.
    """
    view = drawn.view
    groups = {axis: drawn.group_indices(axis) for axis in drawn.parts_of_axis}
    in_row = min(
        SMALL_NODE_CELLS_PER_ROW if gpus_per_node <= 2 * SMALL_NODE_CELLS_PER_ROW else 2 * SMALL_NODE_CELLS_PER_ROW,
        gpus_per_node,
    )
    pieces = []
    for node in range(-(-view.world_size // gpus_per_node)):
        ranks = range(node * gpus_per_node, min((node + 1) * gpus_per_node, view.world_size))
        width = in_row * (CELL + GAP) - GAP
        height = HEAD + -(-len(ranks) // in_row) * (CELL + GAP)
        cells = [Markup('<text x="0" y="10" font-size="10.5" class="faint">node {}</text>').format(node)]
        for place, rank in enumerate(ranks):
            y, x = divmod(place, in_row)
            title = f"rank {rank}: " + ", ".join(f"{a} {drawn.coordinate(rank, a)}" for a in groups)
            marks = Markup(" ").join(Markup('data-{}="{}"').format(axis, groups[axis][rank]) for axis in groups)
            left = x * (CELL + GAP)
            top = HEAD + y * (CELL + GAP)
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
    """Return the axes of a view with their degrees, and the axis to show first (ep, or the fastest one above 1)."""
    axes = [(axis, drawn.degree(axis)) for axis in drawn.parts_of_axis]
    cutting = [axis for axis, degree in axes if degree > 1]
    return axes, "ep" if "ep" in cutting else (cutting or [axes[-1][0]])[-1]
