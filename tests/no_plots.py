"""Runs of the tests without loss.png: matplotlib takes longer to draw it than a tiny model to train four steps.

`e2e/test_train.py` looks at the plot of a run in a process of its own, `metrics/test_plot.py` at what is drawn.
"""

import sys
from pathlib import Path

RUN_LOG = "moefold.train.callbacks.run_log"


def leave_out_plots() -> None:
    """Replace what draws the loss at the end of a run, if this process has imported it."""
    if RUN_LOG in sys.modules:
        sys.modules[RUN_LOG].plot_loss = _draw_nothing  # type: ignore[attr-defined]


def _draw_nothing(run_dir: Path) -> Path:
    return run_dir
