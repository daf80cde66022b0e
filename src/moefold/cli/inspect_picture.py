"""Picture of a run's load balance: heat maps of each layer's experts over time, with load, dead experts and drops."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from moefold.errors import ConfigError
from moefold.host.output_file import PICTURE_SUFFIXES, check_output_path
from moefold.metrics.expert_balance import ExpertBalance, split_into_bins
from moefold.metrics.expert_counts import Array
from moefold.metrics.metric_curves import MetricCurve
from moefold.metrics.plot import escape_plot_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MAX_MAPS = 12
MAX_BINS = 240
COLUMNS = 4
MAX_NAMED_LAYERS = 6
"""Maximum number of layers named in the legend. With more layers it names only the first and the last curve."""
DPI = 150
INK = "#1c2430"
FAINT = "#7a8594"
DEAD = "#16181d"
LOAD_COLORS = ("#2b5c8a", "#7fb0d3", "#f4f4f2", "#f2a065", "#b5301f")
"""Colours of loads below, at and above the mean."""
CURVES_HEIGHT = 2.7
"""Height of a row of curves, in inches."""
HELD_OUT = "eval_reward"
MAX_LOG2_LOAD = 2.0
"""The colour scale ends at 2**-2 and 2**2 times the mean."""


def save_picture(
    balance: ExpertBalance, path: Path, rewards: Sequence[MetricCurve] = (), sites: Sequence[MetricCurve] = ()
) -> None:
    """Draw a run's load balance, and its curves of reinforcement learning and sites, into a .png, .svg or .pdf file."""
    check_output_path("--picture", path, PICTURE_SUFFIXES)
    # Avoid pyplot, which would pick a display and keep every figure alive.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    shown_layers = _shown_layers(balance)
    columns = min(COLUMNS, len(shown_layers)) if balance.counts is not None else 1
    rows = -(-len(shown_layers) // columns) if balance.counts is not None else 1
    width = max(9.0, 2.0 + 2.9 * columns)
    maps_height = rows * 2.15 if balance.counts is not None else max(2.0, 0.9 + 0.16 * len(balance.layers))
    heights = [maps_height + 0.8, CURVES_HEIGHT, *[CURVES_HEIGHT for drawn in (rewards, sites) if drawn]]
    figure = Figure(figsize=(width, sum(heights)), dpi=DPI, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    maps, curves, *further = figure.subfigures(len(heights), 1, squeeze=False, height_ratios=heights).flat
    maps.suptitle(_title(balance, shown_layers), x=0.012, ha="left", fontsize=12, color=INK, fontweight="bold")
    if balance.counts is None:
        _draw_layer_map(maps, balance)
    else:
        _draw_expert_maps(maps, balance, shown_layers, (rows, columns))
    _draw_curves(curves, balance)
    if rewards:
        _draw_rewards(further[0], rewards)
    if sites:
        _draw_panels(further[-1], sites)
    try:
        figure.savefig(path)
    except OSError as error:
        raise ConfigError(f"--picture {path} cannot be written: {error.strerror}") from None


def _shown_layers(balance: ExpertBalance) -> list[int]:
    """Return the indices of the layers to draw: all, or the least even layers and an even spread over the depth."""
    count = len(balance.layers)
    if count <= MAX_MAPS:
        return list(range(count))
    unevenness = [summary.load_cv or 0.0 for summary in balance.summaries()]
    least_even = sorted(range(count), key=lambda i: -unevenness[i])[: MAX_MAPS // 2]
    other_layers = [i for i in range(count) if i not in least_even]
    num_spread = MAX_MAPS - len(least_even)
    return sorted(
        least_even + [other_layers[round(i * (len(other_layers) - 1) / (num_spread - 1))] for i in range(num_spread)]
    )


def _title(balance: ExpertBalance, shown_layers: list[int]) -> str:
    count = len(balance.layers)
    layers = f"{count} MoE layer{'s' if count > 1 else ''}"
    if balance.counts is not None and len(shown_layers) < count:
        layers = f"{len(shown_layers)} of {layers}, the {MAX_MAPS // 2} least even among them,"
    experts = f" of {balance.num_experts} experts" if balance.num_experts else ""
    name = escape_plot_text(balance.run_dir.resolve().name)
    return f"{name}: {layers}{experts}, steps {balance.steps[0]:,} to {balance.steps[-1]:,}"


def _colours() -> Any:
    from matplotlib.colors import LinearSegmentedColormap

    return LinearSegmentedColormap.from_list("load", LOAD_COLORS).with_extremes(bad=DEAD)


def _extent(balance: ExpertBalance, rows: int) -> tuple[float, float, float, float]:
    """Return left, right, bottom and top of a map: steps along x, experts or layers downwards along y."""
    first = float(balance.steps[0])
    last = float(balance.steps[-1])
    return first - 0.5, last + 0.5, rows - 0.5, -0.5


def _draw_expert_maps(figure: Any, balance: ExpertBalance, shown_layers: list[int], grid: tuple[int, int]) -> None:
    assert balance.num_experts is not None
    shares = balance.shares(MAX_BINS)
    all_axes = figure.subplots(*grid, sharex=True, sharey=True, squeeze=False)
    image = None
    for axes, index in zip(all_axes.flat, shown_layers, strict=False):
        share_TE = shares[:, index]
        # A dead expert has no logarithm. It gets a separate colour.
        logarithm = np.log2(np.where(share_TE > 0, share_TE, np.nan))
        image = axes.imshow(
            np.ma.masked_invalid(logarithm.T),
            aspect="auto",
            interpolation="nearest",
            cmap=_colours(),
            vmin=-MAX_LOG2_LOAD,
            vmax=MAX_LOG2_LOAD,
            extent=_extent(balance, balance.num_experts),
        )
        axes.set_title(f"layer {balance.layers[index]}", fontsize=9, color=INK, loc="left", pad=3)
        _style_map(axes)
        axes.yaxis.get_major_locator().set_params(integer=True)
        axes.xaxis.get_major_locator().set_params(integer=True, nbins=4)
    for axes in all_axes.flat[len(shown_layers) :]:
        axes.axis("off")
    for axes in all_axes[:, 0]:
        axes.set_ylabel("expert", color=INK, fontsize=9)
    assert image is not None
    bar = figure.colorbar(image, ax=all_axes, pad=0.01, aspect=28, extend="both")
    bar.set_ticks([-2, -1, 0, 1, 2], labels=["¼", "½", "even", "2", "4"])
    _style_bar(bar, "tokens over the mean (black: none)")


def _draw_layer_map(figure: Any, balance: ExpertBalance) -> None:
    """Draw the load of each layer over time, for runs whose files do not identify the experts."""
    axes = figure.subplots()
    rows = np.stack([balance.load[a:b].mean(0) for a, b in split_into_bins(len(balance.steps), MAX_BINS)])
    image = axes.imshow(
        np.ma.masked_invalid(rows.T),
        aspect="auto",
        interpolation="nearest",
        cmap="YlOrRd",
        vmin=1.0,
        vmax=max(2.0, float(np.nanmax(rows))),
        extent=_extent(balance, len(balance.layers)),
    )
    axes.set_yticks(range(len(balance.layers)), labels=[str(number) for number in balance.layers])
    axes.set_ylabel("layer", color=INK, fontsize=9)
    _style_map(axes)
    _style_bar(figure.colorbar(image, ax=axes, pad=0.01), "load, max / mean")


def _draw_curves(figure: Any, balance: ExpertBalance) -> None:
    edges = split_into_bins(len(balance.steps), MAX_BINS)
    steps = np.array([balance.steps[a:b].mean() for a, b in edges])
    load = np.stack([balance.load[a:b].mean(0) for a, b in edges])
    panels: list[tuple[str, Array, Array]] = [("load, max / mean", steps, load)]
    if balance.counts is not None:
        dead = np.stack([(np.asarray(balance.counts[a:b]) == 0).sum(2).mean(0) for a, b in edges])
        panels.append(("dead experts in a step", steps, dead))
    if np.nansum(balance.dropped) > 0:
        drop_edges = split_into_bins(len(balance.drop_steps), MAX_BINS)
        drop_steps = np.array([balance.drop_steps[a:b].mean() for a, b in drop_edges])
        panels.append(
            ("dropped tokens, %", drop_steps, 100 * np.stack([balance.dropped[a:b].mean(0) for a, b in drop_edges]))
        )
    row = figure.subplots(1, len(panels), squeeze=False)[0]
    for axes, (name, xs, values) in zip(row, panels, strict=True):
        _draw_lines(axes, balance, xs, values)
        _style_curve(axes, name)
        if name.startswith("load"):
            axes.axhline(1.0, color=FAINT, linewidth=0.8, linestyle=(0, (4, 3)))
            axes.set_ylim(bottom=0.9)
        else:
            axes.set_ylim(0, max(1.0, float(np.nanmax(values)) * 1.08))
        if name.startswith("dead"):
            axes.yaxis.get_major_locator().set_params(integer=True)
    row[0].legend(frameon=False, fontsize=8, labelcolor=INK, ncols=2, loc="upper right")


def _draw_rewards(figure: Any, curves: Sequence[MetricCurve]) -> None:
    """Draw a panel for each curve of reinforcement learning. The held-out reward is in the panel of the reward."""
    panels = [curve for curve in curves if curve.name != HELD_OUT] or list(curves)
    held_out = next((curve for curve in curves if curve.name == HELD_OUT), None)
    for axes, curve in zip(_draw_panels(figure, panels), panels, strict=True):
        if curve.name == "reward" and held_out is not None:
            axes.plot(*held_out.binned(MAX_BINS), color="#b5301f", linewidth=1.2, marker="o", markersize=3)
            axes.lines[-1].set_label("held out, greedy")
            axes.legend(frameon=False, fontsize=8, labelcolor=INK)


def _draw_panels(figure: Any, curves: Sequence[MetricCurve]) -> Sequence[Any]:
    """Draw a row with a panel for each curve, and return the axes of the panels."""
    row: Sequence[Any] = figure.subplots(1, len(curves), squeeze=False)[0]
    for axes, curve in zip(row, curves, strict=True):
        steps, values = curve.binned(MAX_BINS)
        marker = "o" if len(steps) == 1 else ""
        axes.plot(steps, values, color=LOAD_COLORS[0], linewidth=1.2, marker=marker, label="samples")
        _style_curve(axes, curve.title)
        axes.xaxis.get_major_locator().set_params(nbins=4)
    return row


def _draw_lines(axes: "Axes", balance: ExpertBalance, steps: Array, values: Array) -> None:
    """Draw a thin line for each layer, shaded from light (first layer) to dark (last layer), and their mean."""
    from matplotlib import colormaps

    shades = colormaps["Blues"](np.linspace(0.35, 0.95, max(2, len(balance.layers))))
    count = len(balance.layers)
    # With more layers, the shade between the two named layers shows the depth of a layer.
    named_layers = range(count) if count <= MAX_NAMED_LAYERS else (0, count - 1)
    marker = "o" if len(steps) == 1 else ""
    for i in range(len(balance.layers)):
        axes.plot(
            steps,
            values[:, i],
            color=shades[i],
            linewidth=1.0,
            marker=marker,
            label=f"layer {balance.layers[i]}" if i in named_layers else None,
        )
    if len(balance.layers) > 1:
        axes.plot(steps, values.mean(1), color="#b5301f", linewidth=1.6, marker=marker, label="mean")


def _style_curve(axes: Any, title: str) -> None:
    """Style axes with curves over the steps."""
    axes.set_title(title, fontsize=9.5, color=INK, loc="left", pad=4)
    axes.set_xlabel("step", color=INK, fontsize=9)
    axes.grid(axis="y", color="#e6e6e6", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.xaxis.get_major_locator().set_params(integer=True)
    _style(axes)


def _style_map(axes: "Axes") -> None:
    _style(axes)
    axes.spines[:].set_visible(False)


def _style_bar(bar: Any, label: str) -> None:
    bar.set_label(label, color=INK, fontsize=9)
    bar.outline.set_visible(False)
    bar.ax.tick_params(colors=INK, labelsize=8, length=0)


def _style(axes: "Axes") -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#b0b0b0")
    axes.tick_params(colors=INK, labelsize=8)
