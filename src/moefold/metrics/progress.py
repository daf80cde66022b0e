"""Progress display of a training run: a live line on a terminal, plain lines in a file or a pipe."""

import errno
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self, TextIO

from moefold.metrics.step_metrics import StepMetrics
from moefold.terminal import MULTILINE_CHARS, printable

if TYPE_CHECKING:
    from rich.table import Table

    from moefold.console import PrintableConsole

logger = logging.getLogger(__name__)

Clock = Callable[[], float]
"""Monotonic clock in seconds."""

SHORT_RUN_STEPS = 100
"""Runs up to this length print a plain line for every step."""
PLAIN_INTERVAL_S = 5.0
"""Approximate time between plain lines of a longer run, which come at a fixed interval in steps."""
TIMED_STEPS = 10
"""Number of first steps whose fastest one determines the interval: a run may start slowly."""
LIVE_INTERVAL_S = 0.1
"""Least interval between two redraws of the live line."""
MIN_STEP_S = 1e-6
"""Least time of a step, for clocks that do not move."""
BAR_WIDTH = 12
"""Width of the progress bar in columns."""
ETA_WINDOW_STEPS = 50
"""Number of last steps from which the remaining time is estimated."""


class Display(Protocol):
    """Protocol of a progress display."""

    def show(self, metrics: StepMetrics, time_left_s: float, *, is_milestone: bool) -> None:
        """Show a step; steps that are no milestones may be skipped."""

    def message(self, text: str) -> None:
        """Show a permanent line of text."""

    def close(self) -> None:
        """Restore the stream for other output."""


class Progress:
    """Context manager around the training loop: call `update` after each step, `message` for other lines.

    Args:
        steps: last step of the run.
        first_step: first step of this process, 1-based; more than 1 after a resume.
        stream: output stream. A terminal gets a live line, other streams plain lines: every step of a short run, one
            every few seconds of a long one, at a fixed interval in steps, and always the first, the last and those with
            an evaluation.
        clock: clock for step times and line intervals.
        on_broken_pipe: called when the reader of the stream has closed it; later output is discarded.
    """

    _display: Display

    def __init__(
        self,
        steps: int,
        first_step: int,
        stream: TextIO,
        *,
        clock: Clock = time.monotonic,
        on_broken_pipe: Callable[[], None] = lambda: None,
    ) -> None:
        self._on_broken_pipe = on_broken_pipe
        self._steps = steps
        self._first_step = first_step
        self._stream = stream
        self._clock = clock
        self._step_ends_s: deque[float] = deque(maxlen=ETA_WINDOW_STEPS + 1)

    def __enter__(self) -> Self:
        self._display = self._open_display()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._discard_lost_output():
            self._display.close()

    def update(self, metrics: StepMetrics) -> None:
        """Show a finished step."""
        self._step_ends_s.append(self._clock())
        is_milestone = metrics.step in (self._first_step, self._steps) or metrics.eval_loss is not None
        with self._discard_lost_output():
            self._display.show(metrics, self._time_left_s(metrics), is_milestone=is_milestone)

    def message(self, text: str) -> None:
        """Show a permanent line of text, with control characters escaped."""
        with self._discard_lost_output():
            self._display.message(printable(text, MULTILINE_CHARS))

    @contextmanager
    def _discard_lost_output(self) -> Iterator[None]:
        """Redirect the stream to the null device if its reader, its terminal or its disk is gone: training goes on."""
        try:
            yield
        except OSError as error:
            if error.errno not in (errno.EPIPE, errno.EIO):
                logger.warning("the output cannot be written any more (%s): the run goes on without it", error.strerror)
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self._stream.fileno())
            os.close(null)
            if error.errno == errno.EPIPE:
                self._on_broken_pipe()

    def _open_display(self) -> Display:
        if self._stream.isatty():
            # Lazy import: rich takes a tenth of a second.
            from moefold.console import PrintableConsole

            console = PrintableConsole(file=self._stream, highlight=False, markup=False, emoji=False)
            if not console.is_dumb_terminal:
                return LiveDisplay(console, self._steps, self._first_step, clock=self._clock)
        is_short = self._steps - self._first_step < SHORT_RUN_STEPS
        return PlainDisplay(self._stream, self._steps, shows_every_step=is_short, clock=self._clock)

    def _time_left_s(self, metrics: StepMetrics) -> float:
        """Estimate the remaining seconds from the wall time of the last steps, evaluation and saving included."""
        num_timed = len(self._step_ends_s) - 1
        mean_s = (self._step_ends_s[-1] - self._step_ends_s[0]) / num_timed if num_timed else metrics.step_time_s
        return mean_s * (self._steps - metrics.step)


class PlainDisplay:
    """Progress display that writes complete lines only, for log files and pipes."""

    def __init__(self, stream: TextIO, steps: int, *, shows_every_step: bool, clock: Clock) -> None:
        self._stream = stream
        self._steps = steps
        self._shows_every_step = shows_every_step
        self._clock = clock
        self._ended_s: float | None = None
        self._num_timed = 0
        self._fastest_s = float("inf")

    def show(self, metrics: StepMetrics, time_left_s: float, *, is_milestone: bool) -> None:
        """Write the step's line if it is a milestone or a multiple of the interval."""
        self._time_step()
        is_due = self._num_timed > 0 and metrics.step % round_steps(PLAIN_INTERVAL_S / self._fastest_s) == 0
        if is_milestone or self._shows_every_step or is_due:
            self.message(format_step(metrics, self._steps, metrics.eval_loss, time_left_s))

    def _time_step(self) -> None:
        """Record the wall time since the last step, of the first `TIMED_STEPS` steps."""
        if self._num_timed == TIMED_STEPS:
            return
        now_s = self._clock()
        if self._ended_s is not None:
            self._fastest_s = min(self._fastest_s, max(now_s - self._ended_s, MIN_STEP_S))
            self._num_timed += 1
        self._ended_s = now_s

    def message(self, text: str) -> None:
        """Write a line."""
        self._stream.write(text + "\n")
        self._stream.flush()

    def close(self) -> None:
        """Do nothing: all lines are complete."""


class LiveDisplay:
    """Progress display that redraws a bar with the step's numbers at the bottom of a terminal.

    Messages and the steps with an evaluation scroll above it.
    """

    def __init__(self, console: "PrintableConsole", steps: int, first_step: int, *, clock: Clock) -> None:
        from rich.live import Live

        self._console = console
        self._steps = steps
        self._clock = clock
        self._drawn_s = float("-inf")
        self._eval_loss: float | None = None
        self._line = self._draw(first_step - 1, [f"step {first_step - 1}/{steps}"])
        self._live = Live(self._line, console=console, auto_refresh=False)
        self._live.start(refresh=True)

    def show(self, metrics: StepMetrics, time_left_s: float, *, is_milestone: bool) -> None:
        """Redraw the live line, rate-limited; `close` draws the newest state."""
        if metrics.eval_loss is not None:
            self._eval_loss = metrics.eval_loss
            self.message(format_step(metrics, self._steps, metrics.eval_loss, time_left_s))
        self._line = self._draw(metrics.step, step_parts(metrics, self._steps, self._eval_loss, time_left_s))
        now_s = self._clock()
        if is_milestone or now_s - self._drawn_s >= LIVE_INTERVAL_S:
            self._drawn_s = now_s
            self._live.update(self._line, refresh=True)

    def message(self, text: str) -> None:
        """Print above the live line."""
        self._console.print(text, soft_wrap=True)

    def close(self) -> None:
        """Draw the newest state and restore the cursor."""
        self._live.update(self._line, refresh=True)
        self._live.stop()

    def _draw(self, step: int, parts: list[str]) -> "Table":
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        line = Table.grid(padding=(0, 1), expand=True)
        line.add_column(width=BAR_WIDTH)
        line.add_column(no_wrap=True, overflow="crop", ratio=1)
        line.add_row(
            ProgressBar(total=self._steps, completed=step), Text(wrap_parts(parts, self._console.width - BAR_WIDTH - 1))
        )
        return line


def round_steps(steps: float) -> int:
    """Round a number of steps up to 1, 2 or 5 times a power of ten."""
    power = 1
    while steps > 10 * power:
        power *= 10
    return next(factor * power for factor in (1, 2, 5, 10) if steps <= factor * power)


def format_step(metrics: StepMetrics, steps: int, eval_loss: float | None, time_left_s: float) -> str:
    """Return a step as one line; for the arguments see `step_parts`."""
    return "  ".join(step_parts(metrics, steps, eval_loss, time_left_s))


def wrap_parts(parts: list[str], width: int) -> str:
    """Wrap parts into lines of at most `width` characters without splitting a part."""
    lines = [parts[0]]
    for part in parts[1:]:
        if len(lines[-1]) + len(part) + 2 <= width:
            lines[-1] += f"  {part}"
        else:
            lines.append(part)
    return "\n".join(lines)


def step_parts(metrics: StepMetrics, steps: int, eval_loss: float | None, time_left_s: float) -> list[str]:
    """Return the numbers of a step, the most important first.

    Args:
        steps: the last step of the run.
        eval_loss: loss of the last evaluation, possibly of an earlier step; None shows none.
        time_left_s: seconds to the end of the run; not shown for the last step.
    """
    parts = [f"step {metrics.step:>{len(str(steps))}}/{steps}", f"loss {metrics.loss:.4f}"]
    if metrics.indexer_loss:
        parts.append(f"indexer {metrics.indexer_loss:.4f}")
    if eval_loss is not None:
        parts.append(f"eval {eval_loss:.4f}")
    if metrics.rl is not None and metrics.rl["reward"] is not None:
        parts.append(f"reward {metrics.rl['reward']:.3f}")
    parts.append(f"lr {metrics.lr:.3g}")
    parts.append(f"grad norm {metrics.grad_norm:.3g}")
    if metrics.step < steps:
        parts.append(f"{format_duration(time_left_s)} left")
    parts.append(f"{format_count(metrics.tokens_per_s)} tokens/s")
    parts.append(f"{metrics.tflops_per_rank:.3g} TFLOP/s/rank")
    if metrics.worst_expert_load is not None:
        parts.append(f"expert load {metrics.worst_expert_load:.2f}x")
    if metrics.dropped_fraction > 0:
        parts.append(f"dropped {metrics.dropped_fraction:.1%}")
    return parts


def format_count(count: float) -> str:
    """Return a count with three significant digits and a suffix: 950, 12.3k, 4.56M."""
    for suffix, size in (("", 1.0), ("k", 1e3), ("M", 1e6)):
        if count < 999.5 * size:
            return f"{count / size:.3g}{suffix}"
    return f"{count / 1e9:.3g}G"


def format_duration(seconds: float) -> str:
    """Return a duration as m:ss or h:mm:ss, rounded to seconds."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"
