"""Plot of a run's loss curve, gradient norm and expert balance with matplotlib."""

from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from math import isnan, nan
from pathlib import Path
from typing import TYPE_CHECKING

from moefold.errors import ConfigError
from moefold.metrics.reader import METRICS_FILE, finite_number, read_records, value_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes


LOSS_PLOT_FILE = "loss.png"
"""Name of the plot in the run folder."""

_TRAIN = "#4c78a8"
_EVAL = "#d1495b"
_MEAN = "#8d99ae"
_TEXT_COLOR = "#333333"
_SMOOTH_FROM_STEPS = 20
"""Minimum length of a run for smoothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Curves:
    """Plotted columns of metrics.jsonl, one entry per step. Missing values are NaN."""

    steps: list[int]
    loss: list[float]
    """Loss, or the mean reward in reinforcement learning, like `eval_loss`."""
    eval_steps: list[int]
    eval_loss: list[float]
    lr: list[float]
    grad_norm: list[float]
    worst_load: list[float]
    """Largest expert load (max/mean) of the MoE layers, or empty without MoE layers."""
    mean_load: list[float]
    """Mean expert load (max/mean) of the MoE layers, or empty without MoE layers."""
    tokens: int
    """Total trained tokens."""
    is_reward: bool = False
    """True if the first panel shows rewards."""


def plot_loss(run_dir: Path) -> Path:
    """Plot RUN_DIR/metrics.jsonl to RUN_DIR/loss.png, and return its path.

    The upper panel shows training loss, smoothed loss and evaluations. Below are the gradient norm with the learning
    rate and, for MoE models, the expert balance.

    Raises:
        ConfigError: the folder has no metrics.
    """
    curves = read_curves(run_dir)
    # Lazy import: matplotlib takes half a second. No pyplot: it has global state.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    drawers = [_draw_loss, _draw_gradients, *([_draw_balance] if curves.worst_load else [])]
    figure = Figure(figsize=(8, 4.4 + 1.2 * (len(drawers) - 1)), dpi=150, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(drawers), 1, sharex=True, height_ratios=[3.2, *[1] * (len(drawers) - 1)])
    for axes, draw in zip(panels, drawers, strict=True):
        _style(axes)
        draw(axes, curves)
    panels[0].set_title(_title(run_dir, curves), loc="left", fontsize=11, color=_TEXT_COLOR, pad=10)
    panels[-1].set_xlabel("step", color=_TEXT_COLOR)
    panels[-1].xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1, steps=[1, 2, 2.5, 5, 10]))
    path = run_dir / LOSS_PLOT_FILE
    draft = run_dir / f".{LOSS_PLOT_FILE}.tmp"
    try:
        figure.savefig(draft, format="png")
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
    return path


def read_curves(run_dir: Path) -> Curves:
    """Read the curves of a run. Invalid lines are skipped. Raise ConfigError if the folder has no metrics."""
    lines = read_records(run_dir)
    records = [line for line in lines if line["step"] > 0]
    if not records:
        raise ConfigError(
            f"run.dir={str(run_dir)!r} holds no metrics to plot ({METRICS_FILE}); train there for a step first"
        )
    is_reward = isinstance(records[-1].get("rl"), dict)
    train_path, eval_path = ("rl.reward", "rl.eval_reward") if is_reward else ("loss", "eval_loss")
    evaluations = [(line["step"], value) for line in lines if not isnan(value := value_of(line, eval_path))]
    loads = [[finite_number(load) for load in r.get("expert_load", ())] for r in records]
    has_experts = all(loads)
    return Curves(
        steps=[r["step"] for r in records],
        loss=[value_of(r, train_path) for r in records],
        eval_steps=[step for step, _ in evaluations],
        eval_loss=[loss for _, loss in evaluations],
        lr=[value_of(r, "lr") for r in records],
        grad_norm=[value_of(r, "grad_norm") for r in records],
        worst_load=[max(layers) for layers in loads] if has_experts else [],
        mean_load=[sum(layers) / len(layers) for layers in loads] if has_experts else [],
        tokens=records[-1].get("tokens") or 0,
        is_reward=is_reward,
    )


def smooth(values: list[float], half_window: int) -> list[float]:
    """Return a centred moving average with up to `half_window` neighbours on each side. NaN values are excluded.

    A centred window does not lag a falling loss. It shrinks on both sides near the start, and becomes one-sided
    at the end, where the newest values matter.
    """
    sums = list(accumulate((0.0 if isnan(value) else value for value in values), initial=0.0))
    counts = list(accumulate((not isnan(value) for value in values), initial=0))
    averages = []
    for i in range(len(values)):
        first = i - min(half_window, i)
        end = min(i + min(half_window, i) + 1, len(values))
        count = counts[end] - counts[first]
        averages.append((sums[end] - sums[first]) / count if count else nan)
    return averages


def _draw_loss(axes: "Axes", curves: Curves) -> None:
    name = "reward" if curves.is_reward else "loss"
    if len(curves.steps) < _SMOOTH_FROM_STEPS:
        label = f"training {name} ({curves.loss[-1]:.3f})"
        axes.plot(curves.steps, curves.loss, color=_TRAIN, linewidth=1.8, marker="o", markersize=3.5, label=label)
    else:
        smoothed = smooth(curves.loss, max(3, len(curves.loss) // 60))
        axes.plot(curves.steps, curves.loss, color=_TRAIN, linewidth=0.9, alpha=0.35, label=f"training {name}")
        axes.plot(curves.steps, smoothed, color=_TRAIN, linewidth=1.8, label=f"smoothed ({smoothed[-1]:.3f})")
    if curves.eval_steps:
        label = f"held-out {name} ({curves.eval_loss[-1]:.3f})"
        line = axes.plot(curves.eval_steps, curves.eval_loss, color=_EVAL, linewidth=1.2, label=label, zorder=3)[0]
        line.set(marker="o", markersize=4.5, markeredgecolor="white", markeredgewidth=0.8)
    axes.set_ylabel("mean reward" if curves.is_reward else "loss, nats per token", color=_TEXT_COLOR)
    axes.legend(
        frameon=False,
        loc="lower right" if curves.is_reward else "upper right",
        fontsize=9,
        labelcolor=_TEXT_COLOR,
    )


def _draw_balance(axes: "Axes", curves: Curves) -> None:
    axes.axhline(1.0, color=_MEAN, linewidth=0.8, linestyle=(0, (4, 3)))
    axes.plot(
        curves.steps, curves.mean_load, color=_MEAN, linewidth=1.3, marker=_marker(curves), label="mean of layers"
    )
    axes.plot(curves.steps, curves.worst_load, color=_TRAIN, linewidth=1.3, marker=_marker(curves), label="worst layer")
    axes.set_ylim(bottom=0.9)
    axes.set_ylabel("expert load,\nmax / mean", color=_TEXT_COLOR)
    axes.legend(frameon=False, loc="upper right", fontsize=8, ncols=2, labelcolor=_TEXT_COLOR)


def _draw_gradients(axes: "Axes", curves: Curves) -> None:
    """Draw the gradient norm on a log scale, and the learning rate on a second axis to the right."""
    axes.plot(curves.steps, curves.grad_norm, color=_TRAIN, linewidth=1.1, marker=_marker(curves))
    if any(norm > 0 for norm in curves.grad_norm):
        from matplotlib.ticker import LogLocator

        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0), numticks=5))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.minorticks_off()
    axes.set_ylabel("grad norm", color=_TRAIN)
    rate = axes.twinx()
    rate.plot(curves.steps, curves.lr, color=_EVAL, linewidth=1.3, marker=_marker(curves))
    rate.ticklabel_format(axis="y", style="sci", scilimits=(-2, 3))
    rate.set_ylim(bottom=0)
    rate.set_ylabel("learning rate", color=_EVAL)
    rate.tick_params(colors=_TEXT_COLOR, labelsize=8)
    rate.spines[:].set_visible(False)


def _marker(curves: Curves) -> str:
    """Return a marker for a curve with a single point, which a line would not show."""
    return "o" if len(curves.steps) == 1 else ""


def _style(axes: "Axes") -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#b0b0b0")
    axes.tick_params(colors=_TEXT_COLOR, labelsize=9)
    axes.grid(axis="y", color="#e6e6e6", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.margins(x=0.02)


def _title(run_dir: Path, curves: Curves) -> str:
    steps = f"{curves.steps[-1]:,} step" + ("s" if curves.steps[-1] > 1 else "")
    return f"{escape_plot_text(run_dir.resolve().name)}: {steps}, {curves.tokens:,} tokens"


REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


def escape_plot_text(text: str) -> str:
    """Return text for matplotlib, with `$` and characters that its font lacks (they raise warnings) replaced."""
    plain = "".join(character if ord(character) in _characters() else REPLACEMENT for character in text)
    # matplotlib reads text between two dollar signs as a formula.
    return plain.replace("$", r"\$")


@cache
def _characters() -> frozenset[int]:
    from matplotlib.font_manager import FontProperties, findfont, get_font

    return frozenset(get_font(findfont(FontProperties())).get_charmap())
