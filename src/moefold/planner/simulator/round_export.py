"""Export of simulated rounds of reinforcement learning as a trace or a picture. Torch-free."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from moefold.planner.simulator.export import (
    TraceEvent,
    add_title,
    chrome_trace,
    draw_lanes,
    name_track,
    trace_slice,
    write_export,
)
from moefold.planner.simulator.rounds import COPY, DECODE, PREFILL, REWARD, SAMPLING_PARTS, TRAIN, RoundTimeline
from moefold.planner.simulator.timeline import Timeline

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = {COPY: "#8a8f98", PREFILL: "#f2a065", DECODE: "#e3c04b", REWARD: "#7fb0d3", TRAIN: "#2b5c8a"}


def lanes_of(rounds: RoundTimeline) -> Mapping[str, tuple[str, ...]]:
    """Return the lanes of rounds, one for each set of ranks, and the parts that are drawn in each."""
    if rounds.rounds_ahead is None:
        return {"all ranks": (*SAMPLING_PARTS, TRAIN)}
    return {"ranks that train": (TRAIN,), "ranks that sample": SAMPLING_PARTS}


def write_rounds(rounds: RoundTimeline, step: Timeline, path: Path) -> None:
    """Write rounds as a trace (.json), in which the training steps have their passes, or draw them.

    Args:
        rounds: the simulated rounds.
        step: the simulated training step.
        path: ends in .json, .png, .svg or .pdf.

    Raises:
        ConfigError: the suffix is another one, or the file cannot be written.
    """
    write_export(path, lambda: rounds_trace(rounds, step), lambda: draw_rounds(rounds))


def rounds_trace(rounds: RoundTimeline, step: Timeline) -> list[TraceEvent]:
    """Return the rounds in the trace event format: a process for each lane, and for each pipeline rank."""
    inner = chrome_trace(step)
    events = [event for event in inner if event["ph"] == "M"]
    for number, (name, parts) in enumerate(lanes_of(rounds).items()):
        pid = step.num_ranks + number
        events += name_track("process", name, number - 2, {"pid": pid})
        for phase in (phase for phase in rounds.phases if phase.part in parts):
            title = f"{phase.part} {phase.round_number}"
            span = phase.start_s, phase.end_s
            events.append(trace_slice(title, phase.part, span, {"pid": pid, "tid": 0}, {"round": phase.round_number}))
    for number, phase in enumerate(phase for phase in rounds.phases if phase.part == TRAIN):
        for event in inner:
            if event["ph"] != "M":
                moved = event | {"ts": event["ts"] + phase.start_s * 1e6}
                # Arrows have a number of their own in each step.
                events.append(moved | {"id": f"{number}.{event['id']}"} if "id" in event else moved)
    return events


def draw_rounds(rounds: RoundTimeline) -> "Figure":
    """Draw the phases in their lanes."""
    lanes = lanes_of(rounds)
    end_s = max(phase.end_s for phase in rounds.phases)
    figure, (axes,), scale = draw_lanes(lanes, [(0.0, end_s)], end_s)
    for lane, parts in enumerate(lanes.values()):
        for phase in (phase for phase in rounds.phases if phase.part in parts):
            bar = (phase.start_s * scale, (phase.end_s - phase.start_s) * scale)
            axes.broken_barh([bar], (lane - 0.4, 0.8), facecolor=COLOURS[phase.part], edgecolor="white", lw=0.3)
    drawn = {phase.part for phase in rounds.phases}
    title = f"{rounds.step_s:.4g} s a step of reinforcement learning (decoding is not calibrated)"
    add_title(figure, title, {part: colour for part, colour in COLOURS.items() if part in drawn})
    return figure
