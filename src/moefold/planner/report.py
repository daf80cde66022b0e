"""Report of a plan: one HTML page with the ranking, pictures by matplotlib and the recipe. Torch-free."""

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

from jinja2 import Environment
from markupsafe import Markup

from moefold import __version__
from moefold.cost.hardware import GIB, Device
from moefold.errors import ConfigError
from moefold.planner.colours import FAINT, INK, MEMORY_COLOURS, TIME_COLOURS
from moefold.planner.cost_model.workload import TrainingWorkload
from moefold.planner.mapping import (
    ParallelMapping,
    describe_strategy,
    format_compact_degrees,
    format_rate,
    format_seconds,
)
from moefold.planner.planner import PlanRequest
from moefold.planner.search.search import PlannedMapping
from moefold.planner.simulator.export import draw_timeline
from moefold.planner.simulator.timeline import Timeline
from moefold.planner.validation import STATED_ERROR

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MAX_SHOWN_PLANS = 10
OVER_LIMIT = 0.95
"""Share of a GPU's memory above which a total is marked."""
PAGE_DPI = 110
BAR_HEIGHT = 0.5
"""Inches of a bar with its name."""


@dataclass(frozen=True, kw_only=True)
class PlanReport:
    """The request, and the plans that the search found."""

    request: PlanRequest
    workload: TrainingWorkload
    """The workload as the best plan shares its attention."""
    plans: Sequence[PlannedMapping]
    """At least one, best first."""
    timeline: Timeline
    """The simulated step of the best plan."""
    command: str = ""
    """Command that wrote the page."""
    date: str = ""
    recipe: str = ""
    """Recipe of the best mapping; empty if none can be written."""


def write_report(report: PlanReport, path: Path) -> None:
    """Write the page.

    Raises:
        ConfigError: the file cannot be written.
    """
    try:
        path.write_text(render_report(report), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--report {path} cannot be written: {error.strerror}") from None


def render_report(report: PlanReport) -> str:
    """Render the page as text."""
    shown = report.plans[:MAX_SHOWN_PLANS]
    gpu = report.request.device
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string((files("moefold.planner") / "report.html").read_text(encoding="utf-8"))
    memory = [{part: size / GIB for part, size in plan.memory_parts.items()} for plan in shown]
    limits = {"all of a GPU": gpu.memory_gib}
    if report.request.reserve_gib:
        limits["what a mapping may use"] = report.request.usable_device.memory_gib
    names = [format_compact_mapping(plan.mapping) for plan in shown]
    return template.render(
        report=report,
        request=report.request,
        version=__version__,
        stated_error=STATED_ERROR,
        names=names,
        rows=[_cells(name, plan, gpu) for name, plan in zip(names, shown, strict=True)],
        memory=_picture(draw_bars(names, memory, MEMORY_COLOURS, "GiB", limits), "memory by part"),
        time=_picture(
            draw_bars(names, [plan.time.parts for plan in shown], TIME_COLOURS, "seconds", {}), "seconds by part"
        ),
        timeline=_picture(draw_timeline(report.timeline), "passes of each pipeline rank"),
        data=_embedded_json(report, shown),
    )


def format_compact_mapping(mapping: ParallelMapping) -> str:
    """Format a mapping in one line, without default values."""
    return ", ".join(filter(None, (format_compact_degrees(mapping), describe_strategy(mapping))))


def draw_bars(
    names: Sequence[str],
    bars: Sequence[Mapping[str, float]],
    colours: Mapping[str, str],
    unit: str,
    limits: Mapping[str, float],
) -> "Figure":
    """Draw a stacked bar for each name, with a legend of the parts and vertical lines at the limits."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 1.6 + BAR_HEIGHT * len(bars)), facecolor="white", layout="constrained")
    axes = figure.subplots()
    left = [0.0] * len(bars)
    places = range(len(bars))
    for part, colour in colours.items():
        widths = [bar.get(part, 0.0) for bar in bars]
        if any(widths):
            axes.barh(places, widths, left=left, height=0.5, color=colour, label=part.replace("_", " "))
            left = [start + width for start, width in zip(left, widths, strict=True)]
    for place, (name, total) in enumerate(zip(names, left, strict=True)):
        axes.text(0, place - 0.3, f"{name}: {total:.3g} {unit}", fontsize=8, color=INK, va="bottom")
    for name, value in limits.items():
        axes.axvline(value, color=FAINT, linestyle="--", linewidth=1)
        side = "left" if value == max(limits.values()) else "right"
        axes.text(value, -0.75, f" {name} ", fontsize=8, color=FAINT, ha=side, va="bottom")
    axes.set(ylim=(len(bars) - 0.5, -0.9), yticks=[], xlabel=unit)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.legend(ncols=6, fontsize=8, frameon=False, loc="lower left", bbox_to_anchor=(0, 1))
    return figure


def _picture(figure: "Figure", label: str) -> Markup:
    """Return a figure as an element of the page."""
    file = BytesIO()
    figure.savefig(file, format="png", dpi=PAGE_DPI)
    content = base64.b64encode(file.getvalue()).decode("ascii")
    return Markup('<img alt="{}" src="data:image/png;base64,{}">').format(label, content)


def _cells(name: str, plan: PlannedMapping, gpu: Device) -> dict[str, object]:
    """Return the cells of a row of the ranking."""
    time = plan.time
    is_over = plan.memory.total > OVER_LIMIT * gpu.memory_bytes or not plan.memory.fits
    return {
        "name": name,
        "dispatcher": plan.mapping.dispatcher.kind if plan.mapping.ep * plan.mapping.etp > 1 else "–",
        "step_s": format_seconds(time.total_s),
        "mfu": f"{time.mfu:.0%}",
        "tflops": f"{time.tflops_per_gpu:.0f}",
        "tokens": format_rate(time.tokens_per_s_per_gpu),
        "memory": f"{plan.memory.total / GIB:.1f}",
        "is_over": is_over,
        "binding": plan.bottleneck,
    }


def _embedded_json(report: PlanReport, plans: Sequence[PlannedMapping]) -> Markup:
    """Return the numbers of the page as JSON for other programs."""
    rows = [
        plan.mapping.as_dict()
        | {"step_time_s": plan.time.total_s, "mfu": plan.time.mfu, "memory_gib": plan.memory.total / GIB}
        for plan in plans
    ]
    q = report.request
    text = json.dumps({"model": q.model_spec.name, "gpu": q.device.name, "num_gpus": q.num_gpus, "mappings": rows})
    # Inside a script element, only a closing tag can end the text early.
    return Markup(text.replace("<", "\\u003c"))
