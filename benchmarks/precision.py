"""Compare loss curves of low-precision GEMMs with bfloat16: runs from the same weights, one table, one picture.

    python benchmarks/precision.py                    docs/images/precision.png and a table, a few minutes on a CPU
    python benchmarks/precision.py --steps 50 --picture /tmp/precision.png

Each run is `moefold train` in its own process: one model on python-docs, one seed, the same batches. On a CPU the
low-precision numerics are emulated.
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from moefold.metrics.plot import Curves, read_curves, smooth

RECIPE = (
    "model.preset=quickstart",
    "data.kind=python-docs",
    "train.seq_len=128",
    "train.micro_batch_size=8",
    "train.global_batch_size=8",
    "train.lr=2e-3",
    "train.lr_schedule.min_lr=2e-4",
    "train.warmup_steps=20",
    "train.eval_samples=64",
    "checkpoint.resume=never",
)
BASELINE = "dtype"
"""Unquantized bfloat16, the baseline."""
COLOURS = {
    BASELINE: "#333333",
    "float32": "#b0b0b0",
    "fp8-blockwise": "#4c78a8",
    "mxfp8": "#2a9d6f",
    "nvfp4": "#d1495b",
}
"""float32 has GEMMs of higher precision than the baseline. Its difference shows the effect of only rounding."""
HALF_WINDOW = 5
"""Steps on each side in the moving average of the curves."""
END_PART = 10
"""The results are means over the last 1/END_PART of a run."""


def main() -> int:
    """Train the runs, draw the picture and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=150, help="optimizer steps of each run (default 150)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where to train (default cpu)")
    parser.add_argument("--runs", type=Path, default=Path("runs/precision"), help="folder of the runs")
    parser.add_argument("--picture", type=Path, default=Path("docs/images/precision.png"), help="the picture")
    parser.add_argument("--reuse", action="store_true", help="do not train: draw the existing runs")
    parser.add_argument("--only", choices=tuple(COLOURS), help="train this run only, and draw nothing")
    arguments = parser.parse_args()
    for name in () if arguments.reuse else COLOURS:
        if arguments.only in (None, name):
            _train(name, arguments.runs / name, arguments.steps, arguments.device)
    if arguments.only:
        return 0
    curves = {name: read_curves(arguments.runs / name) for name in COLOURS}
    arguments.picture.parent.mkdir(parents=True, exist_ok=True)
    _draw(curves, arguments.picture)
    _print(curves)
    print(f"wrote {arguments.picture}")
    return 0


def _train(name: str, run_dir: Path, steps: int, device: str) -> None:
    recipe = run_dir.parent / "empty.toml"
    recipe.parent.mkdir(parents=True, exist_ok=True)
    recipe.touch()
    kind = f"run.dtype={name}" if name == "float32" else f"train.precision={name}"
    overrides = [*RECIPE, kind, f"run.device={device}", f"run.dir={run_dir}", f"run.steps={steps}"]
    overrides.append(f"train.eval_every={steps}")
    print(f"{name}:", flush=True)
    subprocess.run(
        [sys.executable, "-m", "moefold", "train", str(recipe), *overrides], check=True, env=dict(os.environ)
    )


def _print(curves: dict[str, Curves]) -> None:
    baseline = np.array(curves[BASELINE].loss)
    last = max(1, len(baseline) // END_PART)
    print("| GEMMs | loss, last tenth | against bfloat16 | held-out loss |")
    print("| --- | --- | --- | --- |")
    for name, curve in curves.items():
        loss = np.array(curve.loss)
        difference = f"{loss[-last:].mean() / baseline[-last:].mean() - 1:+.2%}"
        title = "bfloat16" if name == BASELINE else name
        print(f"| {title} | {loss[-last:].mean():.3f} | {difference} | {curve.eval_loss[-1]:.3f} |")


def _draw(curves: dict[str, Curves], path: Path) -> None:
    figure = Figure(figsize=(8, 5), dpi=150, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=[2, 1])
    baseline = np.array(smooth(curves[BASELINE].loss, HALF_WINDOW))
    for name, colour in COLOURS.items():
        line = np.array(smooth(curves[name].loss, HALF_WINDOW))
        top.plot(curves[name].steps, line, color=colour, label="bfloat16" if name == BASELINE else name)
        if name != BASELINE:
            bottom.plot(curves[name].steps, 100 * (line / baseline - 1), color=colour)
    top.set_ylabel("loss, nats per byte")
    top.legend(frameon=False)
    bottom.axhline(0, color=COLOURS[BASELINE], linewidth=0.8)
    bottom.set_ylabel("difference, %")
    bottom.set_xlabel("step")
    figure.savefig(path)


if __name__ == "__main__":
    sys.exit(main())
