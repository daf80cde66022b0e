"""Progress display of a training run: a live line on a terminal, plain lines in a file or a pipe."""

import errno
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Self, TextIO

from moefold.terminal import MULTILINE_CHARS, color_labels, printable

if TYPE_CHECKING:
    from rich.table import Table

    from moefold.console import PrintableConsole

logger = logging.getLogger(__name__)

Clock = Callable[[], float]
"""Monotonic clock in seconds."""

SHORT_RUN_STEPS = 100
"""Runs up to this length print a plain line for every step."""
PLAIN_INTERVAL_S = 5.0
"""Approximate time between plain lines of a longer run. The interval in steps is fixed."""
TIMED_STEPS = 10
"""Number of first steps. The fastest of them determines the interval, because a run may start slowly."""
PLAIN_WIDTH = 120
"""Width of a plain line in columns."""
COMMAND_LABELS = ("next:", "or ", "curves:")
"""First words of messages with a command, which must not be wrapped, so that it can be copied."""
LIVE_INTERVAL_S = 0.1
"""Minimum interval between two redraws of the live line."""
MIN_STEP_S = 1e-6
"""Minimum time of a step, for clocks that do not advance."""
BAR_WIDTH = 12
"""Width of the progress bar in columns."""
ETA_WINDOW_STEPS = 50
"""Number of last steps for the estimate of the remaining time."""


class Progress:
    """Context manager around the training loop: call `update` after each step, `message` for other lines.

    Args:
        steps: last step of the run.
        first_step: first step of this process, 1-based. It is above 1 after a resume.
        stream: output stream. A terminal shows a live line, other streams plain lines. A short run has a line for every
            step. A long run has a line every few seconds, at a fixed interval in steps, and always for the first, the
            last and evaluated steps.
        line: formatter of the steps.
        clock: clock for step times and line intervals.
        on_broken_pipe: called when the reader of the stream has closed it. Later output is discarded.
    """

    _display: "PlainDisplay | LiveDisplay"

    def __init__(
        self,
        steps: int,
        first_step: int,
        stream: TextIO,
        *,
        line: "StepLine | None" = None,
        clock: Clock = time.monotonic,
        on_broken_pipe: Callable[[], None] = lambda: None,
    ) -> None:
        self._line = StepLine(steps, is_gpu=False, evaluates=False) if line is None else line
        self._on_broken_pipe = on_broken_pipe
        self._steps = steps
        self._first_step = first_step
        self._stream = stream
        self._clock = clock
        self._step_ends_s: deque[float] = deque(maxlen=ETA_WINDOW_STEPS + 1)

    def __enter__(self) -> Self:
        self._display = self._open_display()
        return self

    def __exit__(self, *error: object) -> None:
        self.end()

    def update(self, values: Mapping[str, Any]) -> None:
        """Show a finished step."""
        self._step_ends_s.append(self._clock())
        is_milestone = values["step"] in (self._first_step, self._steps) or values["eval_loss"] is not None
        with self._discard_lost_output():
            self._display.show(values, self._time_left_s(values), is_milestone=is_milestone)

    def message(self, text: str) -> None:
        """Show a permanent line of text, with control characters escaped."""
        with self._discard_lost_output():
            self._display.message(printable(text, MULTILINE_CHARS))

    def end(self) -> None:
        """Show the last step as a permanent line and remove the live line. Messages may follow."""
        with self._discard_lost_output():
            self._display.close()

    @contextmanager
    def _discard_lost_output(self) -> Iterator[None]:
        """Redirect the stream to the null device if its reader, terminal or disk is gone. Training continues."""
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

    def _open_display(self) -> "PlainDisplay | LiveDisplay":
        if self._stream.isatty():
            # Lazy import: rich takes a tenth of a second.
            from moefold.console import PrintableConsole

            console = PrintableConsole(file=self._stream, highlight=False, markup=False, emoji=False)
            if not console.is_dumb_terminal:
                return LiveDisplay(console, self._steps, self._first_step, self._line, clock=self._clock)
        is_short = self._steps - self._first_step < SHORT_RUN_STEPS
        return PlainDisplay(self._stream, self._line, shows_every_step=is_short, clock=self._clock)

    def _time_left_s(self, values: Mapping[str, Any]) -> float:
        """Estimate the remaining seconds from the wall time of the last steps, including evaluation and saving."""
        num_timed = len(self._step_ends_s) - 1
        mean_s: float = (
            (self._step_ends_s[-1] - self._step_ends_s[0]) / num_timed if num_timed else values["step_time_s"]
        )
        steps_left: int = self._steps - values["step"]
        return mean_s * steps_left


class PlainDisplay:
    """Progress display that writes complete lines only, for log files and pipes."""

    def __init__(self, stream: TextIO, line: "StepLine", *, shows_every_step: bool, clock: Clock) -> None:
        self._stream = stream
        self._line = line
        self._shows_every_step = shows_every_step
        self._clock = clock
        self._ended_s: float | None = None
        self._num_timed = 0
        self._fastest_s = float("inf")

    def show(self, values: Mapping[str, Any], time_left_s: float, *, is_milestone: bool) -> None:
        """Write the line of a step that is a milestone or a multiple of the interval."""
        self._time_step()
        is_due = self._num_timed > 0 and values["step"] % round_steps(PLAIN_INTERVAL_S / self._fastest_s) == 0
        if is_milestone or self._shows_every_step or is_due:
            self.message(self._line.format(values, time_left_s, PLAIN_WIDTH))

    def _time_step(self) -> None:
        """Record the wall time since the last step, for the first `TIMED_STEPS` steps."""
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

    Messages and the steps with an evaluation scroll above it. The bar disappears when the run ends. Its last step
    stays.
    """

    def __init__(
        self, console: "PrintableConsole", steps: int, first_step: int, line: "StepLine", *, clock: Clock
    ) -> None:
        from rich.live import Live

        self._console = console
        self._steps = steps
        self._line = line
        self._clock = clock
        self._drawn_s = float("-inf")
        self._eval_loss: float | None = None
        self._pending = ""
        """Newest step, unless a line above the bar shows it."""
        self._bar = self._draw(first_step - 1, [f"step {first_step - 1}/{steps}"])
        self._live = Live(self._bar, console=console, auto_refresh=False, transient=True)
        self._live.start(refresh=True)

    def show(self, values: Mapping[str, Any], time_left_s: float, *, is_milestone: bool) -> None:
        """Redraw the live line, rate-limited. Print the line of a step with an evaluation above it."""
        self._pending = self._line.format(values, time_left_s, self._console.width)
        if values["eval_loss"] is not None:
            self._eval_loss = values["eval_loss"]
            self._print_pending()
        now_s = self._clock()
        if is_milestone or now_s - self._drawn_s >= LIVE_INTERVAL_S:
            columns = self._line.columns(values, self._eval_loss, time_left_s)
            self._bar = self._draw(values["step"], [text for text in columns.values() if not text.isspace()])
            self._drawn_s = now_s
            self._live.update(self._bar, refresh=True)

    def message(self, text: str) -> None:
        """Print above the live line, wrapped between words unless it has a command to copy."""
        from rich.text import Text

        has_command = text.startswith(COMMAND_LABELS)
        self._console.print(Text.from_ansi(color_labels(text, os.environ)), soft_wrap=has_command)

    def close(self) -> None:
        """Print the newest step, remove the bar and restore the cursor."""
        self._print_pending()
        self._live.stop()

    def _print_pending(self) -> None:
        if self._pending:
            self.message(self._pending)
            self._pending = ""

    def _draw(self, step: int, columns: list[str]) -> "Table":
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        line = Table.grid(padding=(0, 1), expand=True)
        line.add_column(width=BAR_WIDTH)
        line.add_column(no_wrap=True, overflow="crop", ratio=1)
        text = Text(wrap_columns(columns, self._console.width - BAR_WIDTH - 1))
        line.add_row(ProgressBar(total=self._steps, completed=step), text)
        return line


def round_steps(steps: float) -> int:
    """Round a number of steps up to 1, 2 or 5 times a power of ten."""
    power = 1
    while steps > 10 * power:
        power *= 10
    return next(factor * power for factor in (1, 2, 5, 10) if steps <= factor * power)


class StepLine:
    """Formatter of a step's numbers in columns of fixed width, so that the lines of a run are aligned.

    A column that has appeared stays. It is blank if a step has no value.

    Args:
        steps: the last step of the run.
        is_gpu: whether the ranks train on GPUs: memory and MFU of a CPU are not useful and not shown.
        evaluates: whether the run evaluates. The column is then shown from the first line on.
    """

    def __init__(self, steps: int, *, is_gpu: bool, evaluates: bool) -> None:
        # Lazy import of the table of all numbers, which only the rank with the line needs.
        from moefold.metrics.definitions import LINE

        self._table = LINE
        self._steps = steps
        self._is_gpu = is_gpu
        self._seen = {"eval"} if evaluates else set()

    def format(self, values: Mapping[str, Any], time_left_s: float, width: int) -> str:
        """Return a step as one line of at most `width` columns, without the least important columns if necessary."""
        columns = self.columns(values, values["eval_loss"], time_left_s)
        kept_names: set[str] = set()
        free_width = width + len(GAP)
        for column in sorted(self._table, key=lambda column: column.rank):
            cost = len(columns.get(column.name, "")) + len(GAP)
            if column.name in columns and (cost <= free_width or column.rank == 0):
                kept_names.add(column.name)
                free_width -= cost
        return GAP.join(text for name, text in columns.items() if name in kept_names).rstrip()

    def columns(self, values: Mapping[str, Any], eval_loss: float | None, time_left_s: float) -> dict[str, str]:
        """Return the columns of a step by name, from left to right."""
        step = values["step"]
        texts = {
            column.name: column.text({**values, "eval_loss": eval_loss}, is_gpu=self._is_gpu) for column in self._table
        }
        texts["step"] = f"step {step:>{len(str(self._steps))}}/{self._steps}"
        texts["left"] = f"{format_duration(time_left_s):>7} left" if step < self._steps else ""
        self._seen.update(name for name, text in texts.items() if text)
        return {
            column.name: texts[column.name] or " " * column.width for column in self._table if column.name in self._seen
        }


GAP = "  "
"""Space between two columns."""


def wrap_columns(columns: list[str], width: int) -> str:
    """Wrap columns into lines of at most `width` characters without splitting a column."""
    lines = [columns[0]]
    for column in columns[1:]:
        if len(lines[-1]) + len(column) + len(GAP) <= width:
            lines[-1] += GAP + column
        else:
            lines.append(column)
    return "\n".join(lines)


def format_duration(seconds: float) -> str:
    """Return a duration as m:ss or h:mm:ss, rounded to seconds."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"
