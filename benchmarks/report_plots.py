"""Plots of the reports of benchmarks, with matplotlib."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

from benchmarks.colours import FAINT, INK, PALETTE
from moefold.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
Report = Mapping[str, Any]
MS_PER_S = 1e3
TITLE_CHARS_PER_PANEL = 68
"""Characters of the title per line and panel."""


def draw_report(report: Report, path: Path) -> None:
    """Plot a report that a benchmark wrote with --json.

    Raises:
        ConfigError: the report is of an unknown kind, or the file cannot be written.
    """
    drawers = {
        "step": (2, _draw_step),
        # Reports of `python -m benchmarks.race.step`, which also times other frameworks.
        "comparison": (2, _draw_step),
        "dispatch": (2, _draw_dispatch),
        "ranks": (1, _draw_ranks),
        "scaling": (2, _draw_scaling),
        "documents": (2, _draw_documents),
    }
    if report.get("kind") not in drawers:
        raise ConfigError(f"not a report of a benchmark that can be plotted; the kinds are {', '.join(drawers)}")
    panels, draw = drawers[report["kind"]]
    # Lazy import: matplotlib takes half a second. No pyplot: it has global state.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    engine = ConstrainedLayoutEngine(h_pad=0.12)
    figure = Figure(figsize=(6.5 * panels, 5), dpi=130, facecolor="white", layout=engine)
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, panels, squeeze=False)[0]
    # A long machine name wraps; the constrained layout shrinks the panels.
    title = fill(draw(report, axes), TITLE_CHARS_PER_PANEL * panels)
    figure.suptitle(title, fontsize=11, color=INK, x=0.01, ha="left", fontweight="bold")
    for panel in axes:
        panel.spines[["top", "right"]].set_visible(False)
        panel.tick_params(colors=FAINT, labelsize=8)
    try:
        figure.savefig(path)
    except OSError as error:
        raise ConfigError(f"{path}: the picture cannot be written: {error.strerror}") from None


def _draw_step(report: Report, axes: Sequence["Axes"]) -> str:
    rows = report["rows"]
    left, right = axes
    names = [row["name"] for row in rows]
    medians = [row["median_s"] * MS_PER_S for row in rows]
    quartiles = [
        [(row["median_s"] - row["low_s"]) * MS_PER_S for row in rows],
        [(row["high_s"] - row["median_s"]) * MS_PER_S for row in rows],
    ]
    left.barh(names, medians, xerr=quartiles, color=[PALETTE[0], *[PALETTE[2]] * (len(rows) - 1)], ecolor=FAINT)
    left.invert_yaxis()
    left.set_title("a step, ms (median and quartiles)", fontsize=9.5, color=INK)
    pieces = report["pieces"]
    ticks = range(len(pieces))
    right.barh(ticks, [p["seconds"] * MS_PER_S for p in pieces], color=PALETTE[2], label="measured")
    right.barh(ticks, [p["floor_s"] * MS_PER_S for p in pieces], height=0.4, color=PALETTE[15], label="floor")
    right.set_yticks(ticks, [p["name"] for p in pieces])
    right.invert_yaxis()
    right.set_title("parts of our step by themselves, ms", fontsize=9.5, color=INK)
    right.legend(frameon=False, fontsize=8)
    return f"{report['shape']}, {report['tokens']:,} tokens, {report['dtype']}: {report['machine']}"


def _draw_dispatch(report: Report, axes: Sequence["Axes"]) -> str:
    for panel, grain in zip(axes, ("coarse", "fine"), strict=True):
        bars = [bar for bar in report["bars"] if bar["grain"] == grain]
        names = [bar["name"].replace(" ", "\n") for bar in bars]
        _draw_stacked_bars(panel, names, [bar["parts_s"] for bar in bars])
        panel.set_title(f"{grain}: {bars[0]['experts']}" if bars else grain, fontsize=9.5, color=INK)
    axes[0].set_ylabel("ms, forward and backward", fontsize=9, color=INK)
    return f"One MoE layer on {report['ranks']} ranks, {report['tokens']:,} tokens each: {report['machine']}"


def _draw_ranks(report: Report, axes: Sequence["Axes"]) -> str:
    ranks = report["per_rank"]
    _draw_stacked_bars(axes[0], [str(i) for i in range(len(ranks))], ranks)
    axes[0].set_ylabel("CPU ms of a step", fontsize=9, color=INK)
    axes[0].set_xlabel("rank", fontsize=9, color=INK)
    return f"CPU time of a step on {len(ranks)} ranks"


def _draw_scaling(report: Report, axes: Sequence["Axes"]) -> str:
    left, right = axes
    tokens = report["by_tokens"]
    left.plot([r["tokens"] for r in tokens], [r["tokens_per_s"] for r in tokens], marker="o", color=PALETTE[0])
    left.set_title("tokens/s over tokens a rank", fontsize=9.5, color=INK)
    experts = report["by_experts"]
    right.plot(
        [r["experts"] for r in experts], [r["median_s"] * MS_PER_S for r in experts], marker="o", color=PALETTE[15]
    )
    right.set_title("ms over experts, same active compute", fontsize=9.5, color=INK)
    for panel, key, rows in ((left, "tokens", tokens), (right, "experts", experts)):
        panel.set_xscale("log", base=2)
        panel.set_xticks([r[key] for r in rows], [str(r[key]) for r in rows])
        panel.set_ylim(bottom=0)
    return f"Scaling, {report['dtype']}: {report['machine']}"


def _draw_documents(report: Report, axes: Sequence["Axes"]) -> str:
    left, right = axes
    rows = report["methods"]
    names = [row["method"] for row in rows]
    ticks = range(len(rows))
    left.barh(ticks, [row["busiest_cpu_s"] * MS_PER_S for row in rows], color=PALETTE[0], label="busiest rank")
    left.barh(ticks, [row["mean_cpu_s"] * MS_PER_S for row in rows], height=0.4, color=PALETTE[15], label="mean")
    left.set_title("CPU time of the core attention of a layer, ms", fontsize=9.5, color=INK)
    left.legend(frameon=False, fontsize=8)
    right.barh(ticks, [row["step_s"] * MS_PER_S for row in rows], color=PALETTE[2])
    right.set_title("a step, ms", fontsize=9.5, color=INK)
    for panel in axes:
        panel.set_yticks(ticks, names)
        panel.invert_yaxis()
    return (
        f"Documents of {report['lengths']} in samples of {report['seq_len']:,} tokens, cp={report['cp']} "
        f"dp={report['dp']}: {report['machine']}"
    )


def _draw_stacked_bars(axes: "Axes", names: Sequence[str], bars: Sequence[Mapping[str, float]]) -> None:
    """Draw stacked bars of seconds, in ms, with their sums."""
    bottoms = [0.0] * len(bars)
    for i, part in enumerate(bars[0] if bars else ()):
        heights = [bar[part] * MS_PER_S for bar in bars]
        axes.bar(range(len(bars)), heights, bottom=bottoms, color=PALETTE[i], label=part, width=0.72)
        bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
    for i, total in enumerate(bottoms):
        axes.text(i, total, f"{total:.0f}", ha="center", va="bottom", fontsize=8, color=INK)
    axes.set_xticks(range(len(bars)), names, fontsize=7.5)
    axes.set_ylim(0, 1.25 * max(bottoms, default=1.0))
    axes.legend(frameon=False, fontsize=7.5, loc="upper left", ncols=2)
