"""Export of a simulated step: a trace for Perfetto and Chrome, or a picture."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moefold.config.base.pipeline_actions import Action
from moefold.errors import ConfigError
from moefold.host.output_file import PICTURE_SUFFIXES, check_writable
from moefold.planner.simulator.timeline import COMMUNICATION, COMPUTE, SEND, Span, Timeline, subtract_spans

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

TraceEvent = dict[str, Any]
TRACKS = ("forward", "backward", COMPUTE, COMMUNICATION, SEND)
"""Tracks of a rank in a trace: its passes, and its streams."""
INK = "#1c2430"
FAINT = "#6b7685"
IDLE_COLOUR = "#f1f3f6"
PASS_NAMES = {"F": "forward", "B": "backward", "I": "gradients of inputs", "W": "gradients of weights"}
STEP_TAIL_NAMES = {"dp_comm": "gradients over dp", "optimizer": "optimizer"}
HIDDEN_COMM = "hidden communication"
EXPOSED_COMM = "exposed communication"
LEGEND = {
    PASS_NAMES["F"]: "#7fa8d9",
    PASS_NAMES["B"]: "#8fbf8f",
    PASS_NAMES["I"]: "#a9d3a0",
    PASS_NAMES["W"]: "#e3b778",
    EXPOSED_COMM: "#d0574f",
    HIDDEN_COMM: FAINT,
    STEP_TAIL_NAMES["dp_comm"]: "#c9a0c9",
    STEP_TAIL_NAMES["optimizer"]: "#9a9aa8",
}
"""Colour of everything that a picture of a step may show."""
LANE = (-0.4, 0.4)
UPPER_HALF = (-0.4, -0.02)
LOWER_HALF = (0.02, 0.4)
MIN_LABELLED_FRACTION = 0.012
"""Minimum width of a pass with a label, as a fraction of the picture's width."""


def write_timeline(timeline: Timeline, path: Path) -> None:
    """Write a step as a trace (.json) or draw it (.png, .svg, .pdf)."""
    check_timeline_file(path)
    try:
        if path.suffix.lower() == ".json":
            path.write_text(json.dumps({"traceEvents": chrome_trace(timeline), "displayTimeUnit": "ms"}))
        else:
            draw_timeline(timeline).savefig(path)
    except OSError as error:
        raise ConfigError(f"--timeline {path} cannot be written: {error.strerror}") from None


def check_timeline_file(path: Path) -> None:
    """Check early that the suffix is supported and the path is writable."""
    if path.suffix.lower() not in (".json", *PICTURE_SUFFIXES):
        raise ConfigError(f"--timeline {path} must end in .json, for Perfetto, or in .png, .svg or .pdf, for a picture")
    check_writable("--timeline", path)


def chrome_trace(timeline: Timeline) -> list[TraceEvent]:
    """Return the step in the trace event format.

    Each pipeline rank is a process, times are in microseconds, and arrows connect messages.
    """
    events: list[TraceEvent] = []
    begins = {}
    for rank in range(timeline.num_ranks):
        events += _name_track("process", f"pipeline rank {rank}", rank, {"pid": rank})
        for i, track in enumerate(TRACKS):
            events += _name_track("thread", track, i, {"pid": rank, "tid": i})
        for action, span in timeline.actions(rank):
            track = "forward" if action.kind == "F" else "backward"
            events.append(_slice(rank, track, f"{PASS_NAMES[action.kind]} {action.micro_batch}", span, action))
            if action.kind != "W":
                begins[rank, action.stage, track, action.micro_batch] = events[-1]
    for event in timeline.events:
        events.append(_slice(event.rank, event.stream, event.part, (event.start_s, event.end_s), event.action))
    # Arrows lead from each message to the pass that receives it.
    messages = [event for event in timeline.events if event.stream == SEND and event.action is not None]
    for number, event in enumerate(messages):
        assert event.action is not None
        track, step = ("forward", 1) if event.action.kind == "F" else ("backward", -1)
        receiver = begins[event.peer, event.action.stage + step, track, event.action.micro_batch]
        common = {"name": "message", "cat": SEND, "id": number}
        events.append({"ph": "s", "pid": event.rank, "tid": TRACKS.index(SEND), "ts": event.start_s * 1e6, **common})
        events.append({"ph": "f", "bp": "e", **{key: receiver[key] for key in ("pid", "tid", "ts")}, **common})
    return events


def _name_track(what: str, name: str, position: int, ids: dict[str, int]) -> Iterator[TraceEvent]:
    """Yield the events that name and order a process or thread."""
    yield {"ph": "M", "name": f"{what}_name", **ids, "args": {"name": name}}
    yield {"ph": "M", "name": f"{what}_sort_index", **ids, "args": {"sort_index": position}}


def _slice(rank: int, track: str, name: str, span: Span, action: Action | None) -> TraceEvent:
    """Return the event of an interval."""
    args = {} if action is None else {"action": str(action), "stage": action.stage, "micro_batch": action.micro_batch}
    event: TraceEvent = {"ph": "X", "name": name, "cat": track, "pid": rank, "tid": TRACKS.index(track), "args": args}
    return event | {"ts": span[0] * 1e6, "dur": (span[1] - span[0]) * 1e6}


def draw_timeline(timeline: Timeline) -> "Figure":
    """Draw a lane for each rank: passes above, collectives below, red if exposed."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    ranks = range(timeline.num_ranks)
    unit, scale = ("s", 1.0) if timeline.total_s >= 1 else ("ms", 1e3)
    # No pyplot: it would select a display and keep every figure alive.
    figure = Figure(figsize=(16, 1.5 + 0.42 * len(ranks)), dpi=150, facecolor="white", layout="constrained")
    axes = figure.subplots()
    drawn = set()
    for rank in ranks:
        axes.broken_barh([(0, timeline.total_s * scale)], (rank - 0.44, 0.88), facecolor=IDLE_COLOUR)
        drawn |= _draw_passes(axes, timeline, rank, scale)
        drawn |= _draw_streams(axes, timeline, rank, scale)
    axes.set(xlim=(0, timeline.total_s * scale), ylim=(len(ranks) - 0.5, -0.5))
    axes.set_xlabel(unit, color=FAINT, fontsize=9)
    axes.tick_params(colors=FAINT, labelsize=9, length=0)
    axes.spines[:].set_visible(False)
    axes.set_yticks(ranks, [f"pp rank {rank}" for rank in ranks])
    entries = [Patch(color=colour, label=name) for name, colour in LEGEND.items() if name in drawn]
    layout: dict[str, Any] = {"loc": "outside upper left", "alignment": "left", "ncols": len(entries)}
    title: dict[str, Any] = {"title": format_summary(timeline), "title_fontproperties": {"size": 12, "weight": "bold"}}
    figure.legend(handles=entries, **title, **layout, frameon=False, fontsize=9, labelcolor=FAINT)
    return figure


def format_summary(timeline: Timeline) -> str:
    """Format the metrics of the step in one line."""
    exposed = max(timeline.exposed_s(rank) for rank in range(timeline.num_ranks)) / timeline.total_s
    return (
        f"step {timeline.total_s:.4g} s, bubble {timeline.bubble:.1%} of the work, ranks idle "
        f"{timeline.idle_share:.1%} of the pipeline, exposed communication up to {exposed:.1%} of the step"
    )


def _draw_passes(axes: "Axes", timeline: Timeline, rank: int, scale: float) -> set[str]:
    """Draw the passes of a rank, and return their names."""
    least = MIN_LABELLED_FRACTION * timeline.total_s
    spans = dict(timeline.actions(rank))
    for kind, name in PASS_NAMES.items():
        low, high = LANE
        if timeline.has_overlapping_passes:
            # The forward passes have the upper half of the lane.
            low, high = UPPER_HALF if kind == "F" else LOWER_HALF
        chosen = [(action, span) for action, span in spans.items() if action.kind == kind]
        bars = [(start * scale, (end - start) * scale) for _, (start, end) in chosen]
        axes.broken_barh(bars, (rank + low, high - low), facecolor=LEGEND[name], edgecolor="white", linewidth=0.3)
        for action, (start, end) in chosen:
            if end - start > least:
                at: dict[str, Any] = {"fontsize": 7, "ha": "center", "va": "center", "color": INK}
                axes.text((start + end) / 2 * scale, rank + (low + high) / 2, str(action.micro_batch), **at)
    return {PASS_NAMES[action.kind] for action in spans}


def _draw_streams(axes: "Axes", timeline: Timeline, rank: int, scale: float) -> set[str]:
    """Draw collectives as a thin line at the bottom of the lane, red if exposed, and return the drawn entries."""
    exposed = timeline.exposed(rank)
    hidden = subtract_spans(timeline.spans(rank, COMMUNICATION), exposed)
    drawn = set()
    for name, spans in ((HIDDEN_COMM, hidden), (EXPOSED_COMM, exposed)):
        bars = [(start * scale, (end - start) * scale) for start, end in spans]
        axes.broken_barh(bars, (rank + 0.34, 0.09), facecolor=LEGEND[name])
        drawn |= {name} if bars else set()
    for event in timeline.events_of(rank, COMPUTE, COMMUNICATION):
        if event.action is None:
            bar = (event.start_s * scale, (event.end_s - event.start_s) * scale)
            name = STEP_TAIL_NAMES[event.part]
            axes.broken_barh([bar], (rank - 0.4, 0.72), facecolor=LEGEND[name])
            drawn.add(name)
    return drawn
