"""Charts as SVG: bars in parts, curves, the passes of a pipeline. No more than a page needs; torch-free."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

from moefold.plan.timeline import Timeline

PALETTE = (
    "#4e79a7",
    "#f28e2b",
    "#76b7b2",
    "#e15759",
    "#59a14f",
    "#edc948",
    "#b07aa1",
    "#9c755f",
    "#ff9da7",
    "#a0cbe8",
    "#8cd17d",
    "#d4a6c8",
    "#bab0ac",
    "#86bcb6",
    "#f1ce63",
    "#d37295",
)
INK, FAINT, GRID = "#1c2430", "#6b7685", "#e3e7ec"
PASS_NAMES = {"F": "forward", "B": "backward", "I": "gradients of inputs", "W": "gradients of weights"}
PASS_COLOURS = {"F": "#7fa8d9", "B": "#8fbf8f", "I": "#a9d3a0", "W": "#e3b778"}
CLOSING_COLOURS = {"dp_comm": "#c9a0c9", "optimizer": "#9a9aa8"}
EXPOSED = "#d0574f"
WIDTH = 1160
NAME_WIDTH = 330
VALUE_WIDTH = 90
BAR = 24
MOST_TOLD = 8000
"""Passes that say what they are where the pointer is; of more, the page would be too large."""


@dataclass(frozen=True)
class Curve:
    """One line of a chart."""

    name: str
    points: tuple[tuple[float, float], ...]
    colour: str
    is_dashed: bool = False


def stacked_bars(
    rows: Sequence[tuple[str, Mapping[str, float]]], unit: str, *, limit: float | None = None, digits: int = 2
) -> Markup:
    """A bar for each row, cut into parts that have one colour in all rows; a legend above.

    Args:
        rows: names, and the parts of each; parts of 0 take no place.
        unit: behind the sums.
        limit: where a line is drawn, in the unit; None draws none.
        digits: behind the point.
    """
    names = list(dict.fromkeys(name for _, parts in rows for name, value in parts.items() if value > 0))
    colours = {name: PALETTE[i % len(PALETTE)] for i, name in enumerate(names)}
    largest = max([sum(parts.values()) for _, parts in rows] + [limit or 0.0])
    scale = (WIDTH - NAME_WIDTH - VALUE_WIDTH) / largest if largest else 0.0
    pieces, legend_height = _legend([(colours[name], name.replace("_", " ")) for name in names])
    top = legend_height
    for label, parts in rows:
        pieces.append(_text(0, top + BAR / 2, label, size=11.5, family="monospace"))
        left = float(NAME_WIDTH)
        for name in names:
            value = parts.get(name, 0.0)
            if value <= 0:
                continue
            title = f"{name.replace('_', ' ')}: {value:.{digits}f} {unit}"
            pieces.append(_rect((left, top + 3, value * scale, BAR - 6), colours[name], title, kind="part"))
            left += value * scale
        total = sum(parts.values())
        pieces.append(_text(left + 6, top + BAR / 2, f"{total:.{digits}f} {unit}", size=11.5))
        top += BAR
    if limit is not None:
        x = NAME_WIDTH + limit * scale
        pieces.append(_line((x, legend_height - 2), (x, top + 2), EXPOSED))
        pieces.append(_text(x - 4, top + 12, f"{limit:.{digits}f} {unit} a GPU", size=11, colour=EXPOSED, anchor="end"))
        top += 20
    return _svg(WIDTH, top, pieces)


def line_chart(title: str, x_name: str, y_name: str, curves: Sequence[Curve], *, size: tuple[int, int]) -> Markup:
    """Curves over a common axis, whose marks are the x of the points, spaced evenly; y begins at 0."""
    width, height = size
    xs = sorted({x for curve in curves for x, _ in curve.points})
    top = max((y for curve in curves for _, y in curve.points), default=1.0) * 1.08
    left, right, head, foot = 62.0, width - 14.0, 44.0 + 16 * len(curves), height - 40.0
    step = (right - left) / max(1, len(xs) - 1)

    def place(x: float, y: float) -> tuple[float, float]:
        return left + xs.index(x) * step, foot - (foot - head) * (y / top if top else 0.0)

    pieces = [_text(0, 10, title, size=13, weight="bold")]
    for i in range(5):
        y = top * i / 4
        pieces.append(_line((left, place(xs[0], y)[1]), (right, place(xs[0], y)[1]), GRID))
        pieces.append(_text(left - 6, place(xs[0], y)[1], _short(y), size=10.5, colour=FAINT, anchor="end"))
    for x in xs:
        pieces.append(_text(place(x, 0)[0], foot + 14, f"{x:g}", size=10.5, colour=FAINT, anchor="middle"))
    pieces.append(_text((left + right) / 2, foot + 30, x_name, size=11, colour=FAINT, anchor="middle"))
    for i, curve in enumerate(curves):
        dash = ' stroke-dasharray="5 4"' if curve.is_dashed else ""
        spots = [place(x, y) for x, y in curve.points]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in spots)
        pieces.append(
            Markup('<polyline class="curve" points="{}" fill="none" stroke="{}" stroke-width="2"{}/>').format(
                path, curve.colour, Markup(dash)
            )
        )
        for (x, y), (value, result) in zip(spots, curve.points, strict=True):
            label = f"{curve.name}: {result:.4g} {y_name} at {value:g}"
            pieces.append(
                Markup('<circle cx="{:.1f}" cy="{:.1f}" r="3.5" fill="{}"><title>{}</title></circle>').format(
                    x, y, curve.colour, label
                )
            )
        pieces.append(_rect((left, 22 + 16 * i, 10, 10), curve.colour, ""))
        pieces.append(_text(left + 16, 27 + 16 * i, curve.name, size=11, colour=FAINT))
    pieces.append(_text(0, head - 16, y_name, size=10.5, colour=FAINT))
    return _svg(width, height, pieces)


def pipeline_chart(timeline: Timeline) -> Markup:
    """The passes of every pipeline rank over time, with the end of the step."""
    lane, left = 26.0, 84.0
    scale = (WIDTH - left - 6) / timeline.total_s
    kinds = {event.action.kind for event in timeline.events if event.action is not None}
    entries = [(PASS_COLOURS[kind], name) for kind, name in PASS_NAMES.items() if kind in kinds]
    entries += [(CLOSING_COLOURS["dp_comm"], "gradients over dp"), (CLOSING_COLOURS["optimizer"], "optimizer")]
    pieces, top = _legend(entries)
    halved = timeline.overlaps
    told = sum(1 for rank in range(timeline.num_ranks) for _ in timeline.actions(rank)) <= MOST_TOLD
    for rank in range(timeline.num_ranks):
        y = top + rank * lane
        pieces.append(_text(0, y + lane / 2, f"pp rank {rank}", size=11.5))
        pieces.append(_rect((left, y + 2, timeline.total_s * scale, lane - 4), "#f1f3f6", ""))
        for action, (start, end) in timeline.actions(rank):
            # Where passes overlap, the forward ones have the upper half.
            low, high = (
                (2.0, lane - 2) if not halved else (2.0, lane / 2) if action.kind == "F" else (lane / 2, lane - 2)
            )
            title = f"{PASS_NAMES[action.kind]} of micro-batch {action.micro_batch}, stage {action.stage}"
            title += f": {start:.4f} s to {end:.4f} s"
            box = (left + start * scale, y + low, max(0.4, (end - start) * scale - 0.3), high - low)
            pieces.append(_rect(box, PASS_COLOURS[action.kind], title if told else "", kind="pass"))
        for event in timeline.of(rank, "compute", "communication"):
            if event.action is None:
                box = (left + event.start_s * scale, y + 2, (event.end_s - event.start_s) * scale, lane - 4)
                title = f"{event.part}: {event.end_s - event.start_s:.4f} s"
                pieces.append(_rect(box, CLOSING_COLOURS[event.part], title))
    foot = top + timeline.num_ranks * lane
    for i in range(6):
        seconds = timeline.total_s * i / 5
        anchor = "start" if i == 0 else "end" if i == 5 else "middle"
        pieces.append(
            _text(left + seconds * scale, foot + 12, f"{seconds:.3g} s", size=10.5, colour=FAINT, anchor=anchor)
        )
    return _svg(WIDTH, foot + 22, pieces)


def _legend(entries: Sequence[tuple[str, str]]) -> tuple[list[Markup], float]:
    """Colours with their names in lines, and the height of them."""
    pieces, left, top = [], 0.0, 0.0
    for colour, name in entries:
        width = 28 + 6.6 * len(name)
        if left + width > WIDTH:
            left, top = 0.0, top + 18
        pieces.append(_rect((left, top + 3, 11, 11), colour, ""))
        pieces.append(_text(left + 16, top + 9, name, size=11.5, colour=FAINT))
        left += width
    return pieces, top + 26


def _svg(width: float, height: float, pieces: Sequence[Markup]) -> Markup:
    head = Markup('<svg viewBox="0 0 {:.0f} {:.0f}" width="{:.0f}" role="img">').format(width, height, width)
    return head + Markup("").join(pieces) + Markup("</svg>")


def _rect(box: tuple[float, float, float, float], fill: str, title: str, *, kind: str = "") -> Markup:
    inner = Markup("<title>{}</title>").format(title) if title else Markup("")
    named = Markup(' class="{}"').format(kind) if kind else Markup("")
    return Markup('<rect{} x="{:.2f}" y="{:.2f}" width="{:.2f}" height="{:.2f}" fill="{}">{}</rect>').format(
        named, *box, fill, inner
    )


def _line(start: tuple[float, float], end: tuple[float, float], colour: str) -> Markup:
    return Markup('<line x1="{:.1f}" y1="{:.1f}" x2="{:.1f}" y2="{:.1f}" stroke="{}"/>').format(*start, *end, colour)


def _text(
    x: float,
    y: float,
    text: str,
    *,
    size: float,
    colour: str = INK,
    anchor: str = "start",
    weight: str = "normal",
    family: str = "inherit",
) -> Markup:
    form = (
        '<text x="{:.1f}" y="{:.1f}" font-size="{}" fill="{}" text-anchor="{}" font-weight="{}" font-family="{}" '
        'dominant-baseline="central">{}</text>'
    )
    return Markup(form).format(x, y, size, colour, anchor, weight, family, escape(text))


def _short(value: float) -> str:
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value:.3g}"
