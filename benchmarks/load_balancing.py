"""Compare methods of load balancing of experts: four runs from the same weights, one table, one picture.

    python benchmarks/load_balancing.py             a few minutes on a CPU
    python benchmarks/load_balancing.py --steps 50 --picture /tmp/balance.png

Each run is `moefold train` in its own process: the quickstart's model on python-docs, one seed, the same batches. The
table is the one of docs/balance.md.
"""

import argparse
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from moefold.metrics.expert_balance import ExpertBalance, read_balance
from moefold.metrics.plot import Curves, read_curves, smooth

RECIPE = (
    "model.preset=quickstart",
    "data.kind=python-docs",
    "run.dtype=float32",
    "run.device=cpu",
    "train.seq_len=128",
    "train.micro_batch_size=2",
    "train.global_batch_size=16",
    "train.lr=2e-3",
    "train.lr_schedule.min_lr=2e-4",
    "train.warmup_steps=20",
    "train.eval_samples=128",
    "checkpoint.resume=never",
)
INK = "#1c2430"
FAINT = "#b0b0b0"
END_PART = 10
"""The results are means over the last 1/END_PART of a run."""


@dataclass(frozen=True)
class Method:
    """A method of load balancing, and the overrides that select it."""

    name: str
    title: str
    colour: str
    overrides: tuple[str, ...]


METHODS = (
    Method("none", "none", "#8d99ae", ("moe.aux_loss=0.0",)),
    Method("micro_batch", "aux, micro-batch", "#4c78a8", ("moe.aux_loss=0.01", "moe.aux_kind=micro_batch")),
    Method("global_batch", "aux, global batch", "#2a9d6f", ("moe.aux_loss=0.01", "moe.aux_kind=global_batch")),
    Method(
        "expert_bias", "expert bias, no aux", "#d1495b", ("moe.aux_loss=0.0", "model.ffn.moe.router.expert_bias=true")
    ),
)


@dataclass(frozen=True)
class Result:
    """Curves and expert balance of one run."""

    method: Method
    curves: Curves
    balance: ExpertBalance

    def end_loss(self) -> float:
        """Return the mean training loss of the last tenth, in nats per byte."""
        return float(np.mean(self.curves.loss[-max(1, len(self.curves.loss) // END_PART) :]))

    def load(self) -> list[float]:
        """Return the max/mean load of each step, averaged over the layers."""
        values: list[float] = self.balance.load.mean(1).tolist()
        return values


def main() -> int:
    """Train, then draw the picture and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300, help="optimizer steps of each run (default 300)")
    parser.add_argument("--runs", type=Path, default=Path("runs/balance"), help="folder of the runs")
    parser.add_argument("--picture", type=Path, default=Path("docs/images/balance.png"), help="file of the picture")
    parser.add_argument("--reuse", action="store_true", help="do not train: draw the existing runs")
    arguments = parser.parse_args()
    for method in () if arguments.reuse else METHODS:
        _train(method, arguments.runs / method.name, arguments.steps)
    results = []
    for method in METHODS:
        run_dir = arguments.runs / method.name
        results.append(Result(method, read_curves(run_dir), read_balance(run_dir)))
    arguments.picture.parent.mkdir(parents=True, exist_ok=True)
    _draw(results, arguments.picture)
    _print_table(results)
    return 0


def _train(method: Method, run_dir: Path, steps: int) -> None:
    recipe = run_dir.parent / "empty.toml"
    recipe.parent.mkdir(parents=True, exist_ok=True)
    recipe.touch()
    overrides = [*RECIPE, *method.overrides, f"run.dir={run_dir}", f"run.steps={steps}", f"train.eval_every={steps}"]
    print(f"{method.title}:", flush=True)
    subprocess.run(
        [sys.executable, "-m", "moefold", "train", str(recipe), *overrides], check=True, env=dict(os.environ)
    )


def _print_table(results: list[Result]) -> None:
    """Print the table of docs/balance.md: loads and entropy are means over the layers of the last tenth."""
    print("| balance | loss, last tenth | held-out loss | load, max / mean | cv | dead experts | router entropy |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for result in results:
        summaries = result.balance.summaries()
        load = np.mean([summary.load_end for summary in summaries])
        cv = np.mean([summary.load_cv for summary in summaries if summary.load_cv is not None])
        dead = sum(len(summary.dead_experts or ()) for summary in summaries)
        entropy = np.mean([summary.router_entropy for summary in summaries if summary.router_entropy is not None])
        held_out = result.curves.eval_loss[-1]
        print(
            f"| {result.method.title} | {result.end_loss():.3f} | {held_out:.3f} | {load:.2f} | {cv:.3f} | {dead} | "
            f"{entropy:.2f} |"
        )


def _draw(results: list[Result], path: Path) -> None:
    figure = Figure(figsize=(11, 4.2), dpi=150, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    for result in results:
        steps = result.curves.steps
        half_window = max(3, len(steps) // 60)
        colour = result.method.colour
        left.plot(steps, result.curves.loss, color=colour, linewidth=0.6, alpha=0.2)
        left.plot(
            steps, smooth(result.curves.loss, half_window), color=colour, linewidth=1.7, label=result.method.title
        )
        right.plot(result.balance.steps, result.load(), color=colour, linewidth=0.6, alpha=0.2)
        right.plot(result.balance.steps, smooth(result.load(), half_window), color=colour, linewidth=1.7)
    end_losses = [loss for result in results for loss in result.curves.loss[len(result.curves.loss) // 20 :]]
    left.set_ylim(min(end_losses) - 0.1, max(end_losses) + 0.1)
    left.legend(frameon=False, fontsize=9, labelcolor=INK)
    right.axhline(1.0, color=FAINT, linewidth=0.8, linestyle=(0, (4, 3)))
    right.set_ylim(bottom=0.9)
    names = ("training loss, nats per byte", "max / mean load of the experts, mean over the layers")
    for axes, name in zip((left, right), names, strict=True):
        axes.set_title(name, loc="left", fontsize=10, color=INK)
        axes.set_xlabel("step", color=INK, fontsize=9)
        axes.grid(axis="y", color="#e6e6e6", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["left", "bottom"]].set_color(FAINT)
        axes.tick_params(colors=INK, labelsize=8)
        axes.margins(x=0.01)
    figure.savefig(path)


if __name__ == "__main__":
    sys.exit(main())
