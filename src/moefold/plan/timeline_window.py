"""The parts of a simulated step that a picture shows where the whole of it would be slivers. Torch-free."""

from moefold.plan.timeline import Span, Timeline

MAX_PASSES = 160
"""Passes of a rank that one picture shows side by side."""
PASSES_PER_WINDOW = 20
"""Passes of a rank in each window of a longer step."""


def choose_windows(timeline: Timeline) -> tuple[Span, ...]:
    """Return the seconds that a picture shows: the whole step, or its start, a steady-state window and its end."""
    passes = max(sum(1 for _ in timeline.actions(rank)) for rank in range(timeline.num_ranks))
    if passes <= MAX_PASSES:
        return ((0.0, timeline.total_s),)
    seconds = timeline.span_s * PASSES_PER_WINDOW / passes
    middle = timeline.span_s / 2
    # Sums of gradients and the update follow the last pass; some passes are shown before them.
    closing = timeline.total_s - timeline.span_s
    return (
        (0.0, seconds),
        (middle - seconds / 2, middle + seconds / 2),
        (timeline.total_s - max(seconds, closing + seconds / 2), timeline.total_s),
    )


def intersects(span: Span, window: Span) -> bool:
    """Return True if some of a span lies within a window."""
    return span[0] < window[1] and span[1] > window[0]


def describe_windows(timeline: Timeline, windows: tuple[Span, ...]) -> str:
    """Say which parts are shown; empty where all of the step is."""
    if len(windows) == 1:
        return ""
    shown = ", ".join(
        f"{name} ({start:.3g} to {end:.3g} s)"
        for name, (start, end) in zip(("start", "steady state", "end"), windows, strict=True)
    )
    return f"windows of a step of {timeline.total_s:.3g} s: {shown}"
