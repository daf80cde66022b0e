"""The progress line: its text, when a plain one appears, and how a terminal shows it."""

import io
import os
import re

import pytest

from moefold.metrics.step_line import PLAIN_INTERVAL_S, Progress, StepLine, format_duration, round_steps
from moefold.units import format_count
from tests.metrics.example import STEP
from tests.moved_clock import MovedClock


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def run_plain(steps: int, *, first_step: int = 1, step_time_s: float = 1.0, eval_every: int = 0) -> list[str]:
    clock, stream = MovedClock(100.0), io.StringIO()
    with Progress(steps, first_step, stream, clock=clock) as progress:
        for step in range(first_step, steps + 1):
            clock.now_s += step_time_s
            eval_loss = 2.75 if eval_every and step % eval_every == 0 else None
            progress.update(STEP | {"step": step, "step_time_s": step_time_s, "eval_loss": eval_loss})
    return stream.getvalue().splitlines()


def shown_steps(lines: list[str]) -> list[int]:
    return [int(re.match(r"step +(\d+)/", line)[1]) for line in lines]


def test_columns_of_a_run_stand_below_each_other() -> None:
    """Values of other lengths do not move the columns, and steps without an evaluation leave its column blank."""
    line = StepLine(1000, is_gpu=False, evaluates=True)
    first = STEP | {"step": 20, "lr": 3e-4, "tokens_per_s": 4100.0, "expert_load": (1.5,)}
    other = first | {"step": 1000, "loss": -0.01234, "lr": 9.86e-4, "grad_norm": 123.456, "tokens_per_s": 987_654.0}
    assert line.format(first | {"eval_loss": 2.75}, 3725.4, 120) == (
        "step   20/1000  loss  2.5000  eval  2.7500  lr 3.00e-04  grad norm  1.250   4.1k tokens/s  load  1.50x  "
        "1:02:05 left"
    )
    assert line.format(other, 0.0, 120) == (
        "step 1000/1000  loss -0.0123                lr 9.86e-04  grad norm  123.5   988k tokens/s  load  1.50x"
    )


def test_a_gpu_shows_memory_and_mfu_and_a_cpu_neither() -> None:
    metrics = STEP | {"step": 10, "tflops_per_rank": 412.3, "mfu": 0.417, "memory_gib": 61.23}
    text = StepLine(10, is_gpu=True, evaluates=False).format(metrics, 0.0, 120)
    assert "MFU  41.7%" in text
    assert "61.2 GiB" in text
    unknown = StepLine(10, is_gpu=True, evaluates=False).format(metrics | {"mfu": None}, 0.0, 120)
    assert " 412 TFLOP/s" in unknown
    text = StepLine(10, is_gpu=False, evaluates=False).format(metrics, 0.0, 120)
    assert not any(word in text for word in ("MFU", "GiB", "TFLOP"))


def test_preferences_show_their_accuracy_and_margin() -> None:
    metrics = STEP | {"loss_metrics": {"accuracy": 0.7125, "margin": 0.123, "chosen_reward": 0.1}}
    text = StepLine(10, is_gpu=False, evaluates=False).format(metrics, 5.0, 120)
    assert "loss  2.5000  acc  71.2%  margin   0.1230  lr" in text
    own = STEP | {"loss_metrics": {"accuracy": 0.7125}}
    assert "acc" not in StepLine(10, is_gpu=False, evaluates=False).format(own, 5.0, 120), "of a loss of a program"


@pytest.mark.parametrize("width", [60, 80, 100, 120])
@pytest.mark.parametrize("is_gpu", [False, True])
def test_a_line_fits_and_keeps_the_most_important_columns(width: int, is_gpu: bool) -> None:
    line = StepLine(100_000, is_gpu=is_gpu, evaluates=True)
    metrics = STEP | {
        "step": 5,
        "eval_loss": 2.75,
        "mfu": 0.4,
        "dropped_fraction": 0.0123,
        "loss": 1234.5,
        "grad_norm": 1e6,
    }
    text = line.format(metrics, 3725.4, width)
    assert len(text) <= width
    assert text.startswith("step      5/100000  loss 1234.50  eval")
    assert "dropped   1.2%" in line.format(metrics, 3725.4, 200)
    assert "loss     nan" in line.format(metrics | {"loss": float("nan")}, 1.0, width)


def test_a_short_run_prints_every_step() -> None:
    assert shown_steps(run_plain(100, step_time_s=0.001)) == list(range(1, 101))
    assert shown_steps(run_plain(5000, first_step=4901, step_time_s=0.001)) == list(range(4901, 5001))


def test_a_long_run_prints_every_few_seconds() -> None:
    lines = run_plain(1000, step_time_s=1.0)
    every = int(PLAIN_INTERVAL_S)
    assert shown_steps(lines) == [1, *range(every, 1001, every)]


def test_the_interval_in_steps_is_constant_and_round() -> None:
    """The first steps are slow, and the later ones uneven."""
    clock, stream = MovedClock(100.0), io.StringIO()
    with Progress(1000, 1, stream, clock=clock) as progress:
        for step in range(1, 1001):
            clock.now_s += 9.0 if step < 3 else 0.08 + 0.04 * (step % 2)
            progress.update(STEP | {"step": step})
    assert shown_steps(stream.getvalue().splitlines()) == [1, 2, *range(100, 1001, 100)]
    assert [round_steps(number) for number in (0.2, 1, 1.1, 4, 5, 9, 10, 11, 499, 5001)] == [
        1, 1, 2, 5, 5, 10, 10, 20, 500, 10000,
    ]  # fmt: skip


def test_a_long_run_prints_first_last_and_evaluations_at_any_pace() -> None:
    lines = run_plain(1000, step_time_s=0.001, eval_every=400)
    assert shown_steps(lines) == [1, 400, 800, 1000]
    assert ["eval" in line for line in lines] == [False, True, True, False]


def test_a_resumed_run_prints_its_own_first_step() -> None:
    assert shown_steps(run_plain(1000, first_step=501, step_time_s=0.001)) == [501, 1000]


def test_time_left_follows_the_pace_of_the_last_steps() -> None:
    clock, stream = MovedClock(100.0), io.StringIO()
    with Progress(100, 1, stream, clock=clock) as progress:
        progress.update(STEP | {"step": 1, "step_time_s": 30.0})
        for step in range(2, 91):
            # The later steps take 4 s with their saving, though they measure 0.5 s themselves.
            clock.now_s += 1.0 if step <= 40 else 4.0
            progress.update(STEP | {"step": step})
    lines = stream.getvalue().splitlines()
    assert "49:30 left" in lines[0]
    assert "1:20 left" in lines[19]
    assert "0:40 left" in lines[89]


def test_messages_stand_between_the_lines() -> None:
    stream = io.StringIO()
    with Progress(2, 1, stream) as progress:
        progress.message("resumed from step 0")
        progress.update(STEP)
        progress.message("saved [step-000001]")
    lines = stream.getvalue().splitlines()
    assert lines[0] == "resumed from step 0"
    assert lines[1].startswith("step 1/2")
    assert lines[2] == "saved [step-000001]"


def test_plain_output_has_no_control_characters() -> None:
    assert re.fullmatch(r"[ -~\n]*", "\n".join(run_plain(20, eval_every=5)))


@pytest.fixture
def wide_terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "160")
    return Terminal()


def test_a_terminal_keeps_one_line_and_the_messages(wide_terminal: Terminal) -> None:
    clock = MovedClock(100.0)
    with Progress(30, 1, wide_terminal, clock=clock) as progress:
        for step in range(1, 31):
            clock.now_s += 1.0
            progress.update(STEP | {"step": step, "eval_loss": 2.75 if step == 10 else None})
            if step == 20:
                progress.message("saved [bold]step-000020[/bold]")
    text = wide_terminal.getvalue()
    assert "saved [bold]step-000020[/bold]" in text
    assert "step 30/30" in text
    # Every redraw erases the line first, so that only messages, steps with an evaluation and the last step remain.
    assert text.count("\n") == 4
    assert text.endswith("\n\x1b[?25h\r\x1b[1A\x1b[2K"), "the bar is erased"
    assert text.count("\x1b[2K") >= 30
    # The last evaluation stays in sight.
    assert all("eval  2.7500" in part for part in text.split("\x1b[2K") if re.search(r"step (1[0-9]|2[0-9])/30", part))


def test_after_the_end_only_the_last_step_and_the_messages_stand(wide_terminal: Terminal) -> None:
    """An interrupted run shows no time left below its last lines."""
    with Progress(30, 1, wide_terminal) as progress:
        progress.update(STEP | {"step": 7})
        progress.end()
        progress.message("done: 7 steps")
        after = wide_terminal.getvalue().rsplit("\x1b[2K", 1)[1]
    assert wide_terminal.getvalue().endswith(after), "closing draws nothing more"
    assert re.sub(r"\x1b\[[0-9;]*m", "", after).strip() == "done: 7 steps"
    assert "\x1b[1;32mdone" in after


def test_a_terminal_is_not_redrawn_for_every_fast_step(wide_terminal: Terminal) -> None:
    clock = MovedClock(100.0)
    with Progress(1000, 1, wide_terminal, clock=clock) as progress:
        for step in range(1, 900):
            clock.now_s += 0.001
            progress.update(STEP | {"step": step})
    text = wide_terminal.getvalue()
    assert text.count("loss") < 20
    assert "step  899/1000" in text


def test_a_narrow_terminal_takes_more_lines(wide_terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    with Progress(3, 1, wide_terminal) as progress:
        progress.update(STEP)
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", wide_terminal.getvalue())
    assert "step 1/3  loss  2.5000" in text
    assert "load  1.50x" in text
    assert all(len(line) <= 60 for line in re.split(r"[\r\n]", text))


def test_the_cursor_comes_back_after_an_error(wide_terminal: Terminal) -> None:
    def interrupted() -> None:
        with Progress(3, 1, wide_terminal) as progress:
            progress.update(STEP)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert "\x1b[?25l" in wide_terminal.getvalue()
    assert "\x1b[?25h" in wide_terminal.getvalue().rsplit("\x1b[?25l", 1)[1]


def test_a_dumb_terminal_gets_plain_lines(wide_terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    with Progress(2, 1, wide_terminal) as progress:
        progress.update(STEP)
    assert "\x1b" not in wide_terminal.getvalue()
    assert wide_terminal.getvalue().startswith("step 1/2")


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0.0, "0"),
        (4.04, "4.04"),
        (999.0, "999"),
        (999.7, "1k"),
        (12345, "12.3k"),
        (999_600, "1M"),
        (4.56e6, "4.56M"),
        (2e9, "2G"),
    ],
)
def test_format_count(count: float, text: str) -> None:
    assert format_count(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.2, "0:00"), (59.6, "1:00"), (61, "1:01"), (3599.7, "1:00:00"), (360_000, "100:00:00")]
)
def test_format_duration(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


def test_closed_pipe_is_reported_once_and_later_lines_are_discarded() -> None:
    reader, writer = os.pipe()
    told: list[str] = []
    with (
        open(writer, "w", encoding="utf-8") as stream,
        Progress(20, 1, stream, on_broken_pipe=lambda: told.append("closed")) as progress,
    ):
        progress.message("first")
        os.close(reader)
        progress.message("second")
        progress.update(STEP)
    assert told == ["closed"]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full, a disk that is always full")
def test_output_on_a_full_disk_is_said_once_and_left_out(caplog):
    with open("/dev/full", "w", encoding="utf-8") as stream, Progress(20, 1, stream) as progress:
        for _ in range(2):
            progress.message("lost")
            progress.update(STEP)
    assert [record.getMessage() for record in caplog.records] == [
        "the output cannot be written any more (No space left on device): the run goes on without it"
    ]
