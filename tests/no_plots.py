"""Runs of the tests without loss.png: matplotlib takes longer to draw it than a tiny model to train four steps.

`e2e/test_train.py` looks at the plot of a run in a process of its own, `metrics/test_plot.py` at the curves.
"""

from pathlib import Path

from moefold.metrics import plot


def leave_out_plots() -> None:
    """Replace the drawing of the loss at the end of a run; `test_preload.py` asserts that a run draws nothing."""
    plot.plot_loss = _draw_nothing


def _draw_nothing(run_dir: Path) -> Path:
    return run_dir
