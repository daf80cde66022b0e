"""Export of simulated rounds of reinforcement learning as a trace or a picture. Torch-free."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moefold.errors import ConfigError
from moefold.planner.colours import FAINT, INK
from moefold.planner.simulator.export import DPI, LANE, WIDTH, check_timeline_file, chrome_trace
from moefold.planner.simulator.rounds import COPY, DECODE, PREFILL, REWARD, TRAIN, RoundTimeline
from moefold.planner.simulator.timeline import Timeline

COLOURS = {COPY: "#8a8f98", PREFILL: "#f2a065", DECODE: "#e3c04b", REWARD: "#7fb0d3", TRAIN: "#2b5c8a"}


def lanes_of(rounds: RoundTimeline) -> Mapping[str, tuple[str, ...]]:
    """Return the lanes of rounds, one for each set of ranks, and the parts that are drawn in each."""
    sampling = tuple(part for part in COLOURS if part != TRAIN)
    if rounds.rounds_ahead is None:
        return {"all ranks": (*sampling, TRAIN)}
    return {"ranks that train": (TRAIN,), "ranks that sample": sampling}


def write_rounds(rounds: RoundTimeline, step: Timeline, path: Path) -> None:
    """Write rounds as a trace (.json), in which some training steps have their passes, or draw them.

    Args:
        rounds: the simulated rounds.
        step: the simulated training step.
        path: ends in .json, .png, .svg or .pdf.

    Raises:
        ConfigError: the suffix is another one, or the file cannot be written.
    """
    check_timeline_file(path)
    try:
        if path.suffix.lower() == ".json":
            path.write_text(json.dumps(rounds_trace(rounds, step)))
        else:
            _draw(rounds, path)
    except OSError as error:
        raise ConfigError(f"--timeline {path} cannot be written: {error.strerror}") from None


def rounds_trace(rounds: RoundTimeline, step: Timeline) -> dict[str, Any]:
    """Return the rounds in the trace event format: a process for each lane, and for each pipeline rank."""
    events: list[dict[str, Any]] = []
    inner = chrome_trace(step)["traceEvents"]
    events += [event for event in inner if event["ph"] == "M"]
    for number, (name, parts) in enumerate(lanes_of(rounds).items()):
        pid = step.num_ranks + number
        events.append({"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}})
        events.append({"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": number - 2}})
        events += [
            {
                "ph": "X",
                "name": f"{phase.part} {phase.round_number}",
                "cat": phase.part,
                "pid": pid,
                "tid": 0,
                "ts": phase.start_s * 1e6,
                "dur": (phase.end_s - phase.start_s) * 1e6,
                "args": {"round": phase.round_number},
            }
            for phase in rounds.phases
            if phase.part in parts
        ]
    for number, phase in enumerate(phase for phase in rounds.phases if phase.part == TRAIN):
        for event in inner:
            if event["ph"] != "M":
                moved = event | {"ts": event["ts"] + phase.start_s * 1e6}
                # Arrows have a number of their own in each step.
                events.append(moved | {"id": f"{number}.{event['id']}"} if "id" in event else moved)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _draw(rounds: RoundTimeline, path: Path) -> None:
    """Draw the phases in their lanes."""
    # No pyplot: it would select a display and keep every figure alive.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    lanes = lanes_of(rounds)
    height = 1.5 + LANE * 2 * len(lanes)
    figure = Figure(figsize=(WIDTH, height), dpi=DPI, facecolor="white")
    FigureCanvasAgg(figure)
    end_s = max(phase.end_s for phase in rounds.phases)
    unit, scale = ("s", 1.0) if end_s >= 1 else ("ms", 1e3)
    axes = figure.add_axes((0.1, 0.55 / height, 0.89, 1 - 1.35 / height))
    drawn = set()
    for lane, parts in enumerate(lanes.values()):
        axes.broken_barh([(0, end_s * scale)], (lane - 0.44, 0.88), facecolor="#f1f3f6")
        for phase in rounds.phases:
            if phase.part in parts:
                bar = (phase.start_s * scale, (phase.end_s - phase.start_s) * scale)
                axes.broken_barh([bar], (lane - 0.4, 0.8), facecolor=COLOURS[phase.part], edgecolor="white", lw=0.3)
                drawn.add(phase.part)
    axes.set(xlim=(0, end_s * scale), ylim=(len(lanes) - 0.5, -0.5))
    axes.set_yticks(range(len(lanes)), list(lanes), fontsize=9)
    axes.set_xlabel(unit, color=FAINT, fontsize=9, labelpad=1)
    axes.tick_params(colors=FAINT, labelsize=9, length=0)
    axes.spines[:].set_visible(False)
    title = f"{rounds.step_s:.4g} s a step of reinforcement learning (decoding is not calibrated)"
    figure.text(0.008, 1 - 0.3 / height, title, fontsize=12, fontweight="bold", color=INK)
    left = 0.1
    for part in (part for part in COLOURS if part in drawn):
        figure.text(left, 1 - 0.6 / height, "■", color=COLOURS[part], fontsize=10, va="center")
        figure.text(left + 0.011, 1 - 0.6 / height, part, color=FAINT, fontsize=9, va="center")
        left += 0.022 + 0.0052 * len(part)
    figure.savefig(path)
