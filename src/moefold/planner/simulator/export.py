"""Export of a simulated step: a trace for Perfetto and Chrome, or a picture. Torch-free."""

import json
from bisect import bisect_right
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moefold.config.pipeline_action import Action
from moefold.errors import ConfigError
from moefold.host.output_file import PICTURE_SUFFIXES, check_writable
from moefold.planner.colours import (
    EXPOSED_COLOUR,
    FAINT,
    INK,
    PASS_COLOURS,
    PASS_NAMES,
    STEP_TAIL_COLOURS,
    STEP_TAIL_NAMES,
)
from moefold.planner.simulator.timeline import (
    COMMUNICATION,
    COMPUTE,
    SEND,
    Event,
    Span,
    Timeline,
    choose_windows,
    describe_windows,
    intersects,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

TRACKS = ("forward", "backward", COMPUTE, COMMUNICATION, SEND)
"""Tracks of a rank in a trace: its passes, and its streams."""
IDLE_COLOUR = "#f1f3f6"
HIDDEN_COMM = "hidden communication"
EXPOSED_COMM = "exposed communication"
LEGEND = (
    {kind: (PASS_COLOURS[kind], name) for kind, name in PASS_NAMES.items()}
    | {EXPOSED_COMM: (EXPOSED_COLOUR, EXPOSED_COMM), HIDDEN_COMM: (FAINT, HIDDEN_COMM)}
    | {part: (STEP_TAIL_COLOURS[part], name) for part, name in STEP_TAIL_NAMES.items()}
)
"""Colour and name of everything that a picture may show."""
WIDTH = 16.0
LANE = 0.42
DPI = 150
MIN_LABELLED_FRACTION = 0.012
"""Minimum width of a pass with a label, as a fraction of the picture's width."""


def write_timeline(timeline: Timeline, path: Path) -> None:
    """Write a step as a trace (.json) or draw it (.png, .svg, .pdf).

    Raises:
        ConfigError: the suffix is another one, or the file cannot be written.
    """
    check_timeline_file(path)
    try:
        if path.suffix.lower() == ".json":
            path.write_text(json.dumps(chrome_trace(timeline)))
        else:
            draw_timeline(timeline).savefig(path)
    except OSError as error:
        raise ConfigError(f"--timeline {path} cannot be written: {error.strerror}") from None


def check_timeline_file(path: Path) -> None:
    """Check early that the suffix is supported and the path is writable.

    Raises:
        ConfigError: one of them is not.
    """
    if path.suffix.lower() not in (".json", *PICTURE_SUFFIXES):
        raise ConfigError(f"--timeline {path} must end in .json, for Perfetto, or in .png, .svg or .pdf, for a picture")
    check_writable("--timeline", path)


def chrome_trace(timeline: Timeline) -> dict[str, Any]:
    """Return the step in the trace event format.

    Each pipeline rank is a process, times are in microseconds, and arrows connect messages.
    """
    return {
        "traceEvents": [*_metadata_events(timeline), *_slice_events(timeline), *_flow_events(timeline)],
        "displayTimeUnit": "ms",
    }


def _metadata_events(timeline: Timeline) -> Iterator[dict[str, Any]]:
    for rank in range(timeline.num_ranks):
        yield {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"pipeline rank {rank}"}}
        yield {"ph": "M", "name": "process_sort_index", "pid": rank, "args": {"sort_index": rank}}
        for i, track in enumerate(TRACKS):
            yield {"ph": "M", "name": "thread_name", "pid": rank, "tid": i, "args": {"name": track}}
            yield {"ph": "M", "name": "thread_sort_index", "pid": rank, "tid": i, "args": {"sort_index": i}}


def _slice_events(timeline: Timeline) -> Iterator[dict[str, Any]]:
    for rank in range(timeline.num_ranks):
        for action, (start, end) in timeline.actions(rank):
            yield _slice_event(
                rank, _track_index(action), f"{PASS_NAMES[action.kind]} {action.micro_batch}", (start, end), action
            )
    for event in timeline.events:
        track = TRACKS.index(event.stream)
        yield _slice_event(event.rank, track, event.part, (event.start_s, event.end_s), event.action)


def _slice_event(rank: int, track: int, name: str, span: tuple[float, float], action: Action | None) -> dict[str, Any]:
    args = {} if action is None else {"action": str(action), "stage": action.stage, "micro_batch": action.micro_batch}
    start, end = span
    return {
        "ph": "X",
        "name": name,
        "cat": TRACKS[track],
        "pid": rank,
        "tid": track,
        "ts": start * 1e6,
        "dur": (end - start) * 1e6,
        "args": args,
    }


def _flow_events(timeline: Timeline) -> Iterator[dict[str, Any]]:
    """Yield the arrows from each message to the pass that receives it."""
    begins = {
        (rank, action.stage, "F" if action.kind == "F" else "B", action.micro_batch): (start, _track_index(action))
        for rank in range(timeline.num_ranks)
        for action, (start, _) in timeline.actions(rank)
        if action.kind != "W"
    }
    messages = [event for event in timeline.events if event.stream == SEND]
    for number, event in enumerate(messages):
        assert event.action is not None
        way = "F" if event.action.kind == "F" else "B"
        stage = event.action.stage + (1 if way == "F" else -1)
        start, track = begins[event.peer, stage, way, event.action.micro_batch]
        common = {"name": "message", "cat": SEND, "id": number}
        yield {"ph": "s", "pid": event.rank, "tid": TRACKS.index(SEND), "ts": event.start_s * 1e6, **common}
        yield {"ph": "f", "bp": "e", "pid": event.peer, "tid": track, "ts": start * 1e6, **common}


def _track_index(action: Action) -> int:
    return 0 if action.kind == "F" else 1


def draw_timeline(timeline: Timeline) -> "Figure":
    """Draw a lane for each rank: passes above, collectives below, red if exposed; a long step in windows."""
    # No pyplot: it would select a display and keep every figure alive.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    height = 1.5 + LANE * timeline.num_ranks
    figure = Figure(figsize=(WIDTH, height), dpi=DPI, facecolor="white")
    FigureCanvasAgg(figure)
    unit, scale = ("s", 1.0) if timeline.total_s >= 1 else ("ms", 1e3)
    windows = choose_windows(timeline)
    names = [f"pp rank {rank}" for rank in range(timeline.num_ranks)]
    left = 0.055
    right = 0.99
    gap = 0.012
    drawn = set()
    width = (right - left - gap * (len(windows) - 1)) / len(windows)
    for i, window in enumerate(windows):
        axes = figure.add_axes((left + i * (width + gap), 0.55 / height, width, 1 - 1.35 / height))
        for rank in range(timeline.num_ranks):
            axes.broken_barh([(0, timeline.total_s * scale)], (rank - 0.44, 0.88), facecolor=IDLE_COLOUR)
            drawn |= _draw_passes(axes, timeline, rank, (window, len(windows)), scale)
            drawn |= _draw_streams(axes, timeline, rank, window, scale)
        axes.set(xlim=(window[0] * scale, window[1] * scale), ylim=(timeline.num_ranks - 0.5, -0.5))
        axes.set_xlabel(unit, color=FAINT, fontsize=9, labelpad=1)
        axes.set_yticks(range(timeline.num_ranks), names if i == 0 else [""] * timeline.num_ranks, fontsize=9)
        axes.tick_params(colors=FAINT, labelsize=9, length=0)
        for spine in axes.spines.values():
            spine.set_visible(False)
    figure.text(0.008, 1 - 0.3 / height, format_summary(timeline), fontsize=12, fontweight="bold", color=INK)
    faint: dict[str, Any] = {"color": FAINT, "fontsize": 9, "ha": "right"}
    figure.text(right, 1 - 0.6 / height, describe_windows(timeline, windows), va="center", **faint)
    _draw_legend(figure, height, drawn)
    return figure


def format_summary(timeline: Timeline) -> str:
    """Format the metrics of the step in one line."""
    exposed = max(timeline.exposed_s(rank) for rank in range(timeline.num_ranks)) / timeline.total_s
    return (
        f"step {timeline.total_s:.4g} s, bubble {timeline.bubble:.1%} of the work, ranks idle "
        f"{timeline.idle_share:.1%} of the pipeline, exposed communication up to {exposed:.1%} of the step"
    )


def _draw_passes(
    axes: "Axes", timeline: Timeline, rank: int, window_and_count: tuple[Span, int], scale: float
) -> set[str]:
    """Draw the passes of a rank within one of the windows; return their kinds."""
    window, num_windows = window_and_count
    least = MIN_LABELLED_FRACTION * num_windows * (window[1] - window[0])
    spans = {action: span for action, span in timeline.actions(rank) if intersects(span, window)}
    for kind, colour in PASS_COLOURS.items():
        # Where passes overlap, the forward ones have the upper half of the lane.
        low, high = (
            (-0.4, 0.4) if not timeline.has_overlapping_passes else (-0.4, -0.02) if kind == "F" else (0.02, 0.4)
        )
        chosen = [(action, span) for action, span in spans.items() if action.kind == kind]
        bars = [(start * scale, (end - start) * scale) for _, (start, end) in chosen]
        axes.broken_barh(bars, (rank + low, high - low), facecolor=colour, edgecolor="white", linewidth=0.3)
        for action, (start, end) in chosen:
            middle = (start + end) / 2
            if end - start > least and window[0] <= start and end <= window[1]:
                at: dict[str, Any] = {"fontsize": 7, "ha": "center", "va": "center", "color": INK}
                axes.text(middle * scale, rank + (low + high) / 2, str(action.micro_batch), **at)
    return {action.kind for action in spans}


def _draw_streams(axes: "Axes", timeline: Timeline, rank: int, window: Span, scale: float) -> set[str]:
    """Draw collectives as a thin line at the bottom of the lane, red if exposed; return the drawn kinds."""
    compute = [(e.start_s, e.end_s) for e in timeline.events_of(rank, COMPUTE)]
    pieces: dict[str, list[Span]] = {HIDDEN_COMM: [], EXPOSED_COMM: []}
    drawn = set()
    for event in timeline.events_of(rank, COMMUNICATION):
        for start, end, is_hidden in split_by_overlap(event, compute):
            if intersects((start, end), window):
                pieces[HIDDEN_COMM if is_hidden else EXPOSED_COMM].append((start * scale, (end - start) * scale))
    axes.broken_barh(pieces[HIDDEN_COMM], (rank + 0.34, 0.09), facecolor=FAINT)
    axes.broken_barh(pieces[EXPOSED_COMM], (rank + 0.34, 0.09), facecolor=EXPOSED_COLOUR)
    for event in timeline.events_of(rank, COMPUTE, COMMUNICATION):
        if event.action is None and intersects((event.start_s, event.end_s), window):
            bar = (event.start_s * scale, (event.end_s - event.start_s) * scale)
            axes.broken_barh([bar], (rank - 0.4, 0.72), facecolor=STEP_TAIL_COLOURS[event.part])
            drawn.add(event.part)
    return drawn | {kind for kind, spans in pieces.items() if spans}


def split_by_overlap(event: Event, compute: list[tuple[float, float]]) -> Iterator[tuple[float, float, bool]]:
    """Yield the parts of an event that overlap with one of the ordered `compute` spans, and those that do not."""
    at = event.start_s
    first = max(0, bisect_right(compute, (at, float("inf"))) - 1)
    for i in range(first, len(compute)):
        start, end = compute[i]
        if start >= event.end_s:
            break
        if end > at:
            if start > at:
                yield at, start, False
            yield max(at, start), min(end, event.end_s), True
            at = min(end, event.end_s)
    if at < event.end_s:
        yield at, event.end_s, False


def _draw_legend(figure: Any, height: float, drawn: set[str]) -> None:
    """Draw the legend of the colours in the picture."""
    left = 0.055
    for kind, (colour, name) in LEGEND.items():
        if kind in drawn:
            figure.text(left, 1 - 0.6 / height, "■", color=colour, fontsize=10, va="center")
            figure.text(left + 0.011, 1 - 0.6 / height, name, color=FAINT, fontsize=9, va="center")
            left += 0.022 + 0.0052 * len(name)
