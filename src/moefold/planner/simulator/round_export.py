"""Export of simulated rounds, of reinforcement learning or between sites, as a trace or a picture. Torch-free."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moefold.errors import ConfigError
from moefold.planner.colours import FAINT, INK
from moefold.planner.simulator.export import DPI, LANE, WIDTH, check_timeline_file, chrome_trace
from moefold.planner.simulator.rounds import COPY, DECODE, PREFILL, REWARD, TRAIN, Phase, RoundTimeline
from moefold.planner.simulator.site_rounds import EXCHANGE, MEETING, STEP, WAIT, SiteTimeline
from moefold.planner.simulator.timeline import Timeline

COLOURS = {COPY: "#8a8f98", PREFILL: "#f2a065", DECODE: "#e3c04b", REWARD: "#7fb0d3", TRAIN: "#2b5c8a"}


SITE_COLOURS = {STEP: "#2b5c8a", MEETING: "#8a8f98", WAIT: "#c44536", EXCHANGE: "#e3c04b"}
SITE_LINK_LANE = "site link"


@dataclass(frozen=True, kw_only=True)
class RoundChart:
    """Phases to export, and their lanes."""

    phases: Sequence[Phase]
    lanes: Mapping[str, tuple[str, ...]]
    """Name of each lane, and the parts that are drawn in it."""
    colours: Mapping[str, str]
    """Colour of each part."""
    traced: Sequence[Phase]
    """Training steps of which a trace has the passes."""
    title: str


def round_chart(rounds: RoundTimeline) -> RoundChart:
    """Return the chart of rounds of reinforcement learning, with a lane for each set of ranks."""
    sampling = tuple(part for part in COLOURS if part != TRAIN)
    shared: dict[str, tuple[str, ...]] = {"all ranks": (*sampling, TRAIN)}
    split = {"ranks that train": (TRAIN,), "ranks that sample": sampling}
    return RoundChart(
        phases=rounds.phases,
        lanes=shared if rounds.rounds_ahead is None else split,
        colours=COLOURS,
        traced=[phase for phase in rounds.phases if phase.part == TRAIN],
        title=f"{rounds.step_s:.4g} s a step of reinforcement learning (decoding is not calibrated)",
    )


def site_chart(rounds: SiteTimeline) -> RoundChart:
    """Return the chart of the rounds of a site, with a lane of its ranks and one of its link to the others."""
    return RoundChart(
        phases=rounds.phases,
        lanes={"site": (STEP, MEETING, WAIT), SITE_LINK_LANE: (EXCHANGE,)},
        colours=SITE_COLOURS,
        traced=rounds.steps_of_first_round,
        title=f"{rounds.every} steps of a site between its rounds, utilisation {rounds.utilisation:.1%}",
    )


def write_rounds(chart: RoundChart, step: Timeline, path: Path) -> None:
    """Write rounds as a trace (.json), in which some training steps have their passes, or draw them.

    Args:
        chart: the simulated rounds.
        step: the simulated training step.
        path: ends in .json, .png, .svg or .pdf.

    Raises:
        ConfigError: the suffix is another one, or the file cannot be written.
    """
    check_timeline_file(path)
    try:
        if path.suffix.lower() == ".json":
            path.write_text(json.dumps(rounds_trace(chart, step)))
        else:
            _draw(chart, path)
    except OSError as error:
        raise ConfigError(f"--timeline {path} cannot be written: {error.strerror}") from None


def rounds_trace(chart: RoundChart, step: Timeline) -> dict[str, Any]:
    """Return the rounds in the trace event format: a process for each lane, and for each pipeline rank."""
    events: list[dict[str, Any]] = []
    inner = chrome_trace(step)["traceEvents"]
    events += [event for event in inner if event["ph"] == "M"]
    for number, (name, parts) in enumerate(chart.lanes.items()):
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
            for phase in chart.phases
            if phase.part in parts
        ]
    for number, phase in enumerate(chart.traced):
        for event in inner:
            if event["ph"] != "M":
                moved = event | {"ts": event["ts"] + phase.start_s * 1e6}
                # Arrows have a number of their own in each step.
                events.append(moved | {"id": f"{number}.{event['id']}"} if "id" in event else moved)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _draw(chart: RoundChart, path: Path) -> None:
    """Draw the phases in their lanes."""
    # No pyplot: it would select a display and keep every figure alive.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    height = 1.5 + LANE * 2 * len(chart.lanes)
    figure = Figure(figsize=(WIDTH, height), dpi=DPI, facecolor="white")
    FigureCanvasAgg(figure)
    end_s = max(phase.end_s for phase in chart.phases)
    unit, scale = ("s", 1.0) if end_s >= 1 else ("ms", 1e3)
    axes = figure.add_axes((0.1, 0.55 / height, 0.89, 1 - 1.35 / height))
    drawn = set()
    for lane, parts in enumerate(chart.lanes.values()):
        axes.broken_barh([(0, end_s * scale)], (lane - 0.44, 0.88), facecolor="#f1f3f6")
        for phase in chart.phases:
            if phase.part in parts:
                bar = (phase.start_s * scale, (phase.end_s - phase.start_s) * scale)
                axes.broken_barh(
                    [bar], (lane - 0.4, 0.8), facecolor=chart.colours[phase.part], edgecolor="white", lw=0.3
                )
                drawn.add(phase.part)
    axes.set(xlim=(0, end_s * scale), ylim=(len(chart.lanes) - 0.5, -0.5))
    axes.set_yticks(range(len(chart.lanes)), list(chart.lanes), fontsize=9)
    axes.set_xlabel(unit, color=FAINT, fontsize=9, labelpad=1)
    axes.tick_params(colors=FAINT, labelsize=9, length=0)
    axes.spines[:].set_visible(False)
    figure.text(0.008, 1 - 0.3 / height, chart.title, fontsize=12, fontweight="bold", color=INK)
    left = 0.1
    for part in (part for part in chart.colours if part in drawn):
        figure.text(left, 1 - 0.6 / height, "■", color=chart.colours[part], fontsize=10, va="center")
        figure.text(left + 0.011, 1 - 0.6 / height, part, color=FAINT, fontsize=9, va="center")
        left += 0.022 + 0.0052 * len(part)
    figure.savefig(path)
