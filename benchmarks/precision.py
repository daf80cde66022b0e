"""Loss curves of matrix products of few bits beside bfloat16: runs from the same start, one table, one picture.

    python benchmarks/precision.py                    docs/images/precision.png and a table, some minutes on a CPU
    python benchmarks/precision.py --steps 50 --png /tmp/precision.png

Each run is `moefold train` in a process of its own: one model on python-docs, one seed, the same batches. On a CPU the
numerics are simulated.
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
    "train.min_lr=2e-4",
    "train.warmup_steps=20",
    "train.eval_samples=64",
    "checkpoint.resume=never",
)
WIDE = "dtype"
"""Plain bfloat16, which the others are compared with."""
COLOURS = {WIDE: "#333333", "float32": "#b0b0b0", "fp8-blockwise": "#4c78a8", "mxfp8": "#2a9d6f", "nvfp4": "#d1495b"}
"""float32 has wider products, not narrower ones: how far it goes apart is how far rounding alone takes a run."""
HALF = 5
"""A point of a line is the mean of so many steps on each side."""
END_PART = 10
"""The end of a run is its last tenth."""


def main() -> int:
    """Train, then draw and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=150, help="optimizer steps of each run (default 150)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where to train (default cpu)")
    parser.add_argument("--runs", type=Path, default=Path("runs/precision"), help="folder of the runs")
    parser.add_argument("--png", type=Path, default=Path("docs/images/precision.png"), help="the picture")
    parser.add_argument("--reuse", action="store_true", help="train nothing: draw the runs that are there")
    parser.add_argument("--only", choices=tuple(COLOURS), help="train this one alone, and draw nothing")
    arguments = parser.parse_args()
    for name in () if arguments.reuse else COLOURS:
        if arguments.only in (None, name):
            _train(name, arguments.runs / name, arguments.steps, arguments.device)
    if arguments.only:
        return 0
    curves = {name: read_curves(arguments.runs / name) for name in COLOURS}
    arguments.png.parent.mkdir(parents=True, exist_ok=True)
    _draw(curves, arguments.png)
    _print(curves)
    print(f"wrote {arguments.png}")
    return 0


def _train(name: str, run_dir: Path, steps: int, device: str) -> None:
    recipe = run_dir.parent / "empty.toml"
    recipe.parent.mkdir(parents=True, exist_ok=True)
    recipe.touch()
    kind = f"run.dtype={name}" if name == "float32" else f"train.precision={name}"
    words = [*RECIPE, kind, f"run.device={device}", f"run.dir={run_dir}", f"run.steps={steps}"]
    words.append(f"train.eval_every={steps}")
    print(f"{name}:", flush=True)
    subprocess.run([sys.executable, "-m", "moefold", "train", str(recipe), *words], check=True, env=dict(os.environ))


def _print(curves: dict[str, Curves]) -> None:
    wide = np.array(curves[WIDE].loss)
    last = max(1, len(wide) // END_PART)
    print("| products | loss, last tenth | against bfloat16 | held-out loss |")
    print("| --- | --- | --- | --- |")
    for name, curve in curves.items():
        loss = np.array(curve.loss)
        difference = f"{loss[-last:].mean() / wide[-last:].mean() - 1:+.2%}"
        title = "bfloat16" if name == WIDE else name
        print(f"| {title} | {loss[-last:].mean():.3f} | {difference} | {curve.eval_loss[-1]:.3f} |")


def _draw(curves: dict[str, Curves], path: Path) -> None:
    figure = Figure(figsize=(8, 5), dpi=150, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[2, 1])
    wide = np.array(smooth(curves[WIDE].loss, HALF))
    for name, colour in COLOURS.items():
        line = np.array(smooth(curves[name].loss, HALF))
        above.plot(curves[name].steps, line, color=colour, label="bfloat16" if name == WIDE else name)
        if name != WIDE:
            below.plot(curves[name].steps, 100 * (line / wide - 1), color=colour)
    above.set_ylabel("loss, nats per byte")
    above.legend(frameon=False)
    below.axhline(0, color=COLOURS[WIDE], linewidth=0.8)
    below.set_ylabel("difference, %")
    below.set_xlabel("step")
    figure.savefig(path)


if __name__ == "__main__":
    sys.exit(main())
