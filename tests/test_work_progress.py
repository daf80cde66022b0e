"""Progress of long commands on stderr."""

import io
import re
import sys
import threading
import time

import pytest

from moefold.progress import ReadProgress, WorkProgress


class Terminal(io.StringIO):
    """A stderr that takes control sequences."""

    def isatty(self) -> bool:
        """It is one."""
        return True


def _wait_for(text: str, stream: io.StringIO) -> None:
    deadline = time.monotonic() + 60
    while text not in stream.getvalue():
        assert time.monotonic() < deadline, stream.getvalue()
        time.sleep(0.01)


def _replaced(monkeypatch: pytest.MonkeyPatch, stream: io.StringIO) -> io.StringIO:
    """Put a stream in the place of stderr, which pytest itself replaces before each test begins."""
    monkeypatch.setattr(sys, "stderr", stream)
    return stream


def test_each_thing_the_work_is_at_is_a_plain_line_with_the_time(monkeypatch):
    stream = _replaced(monkeypatch, io.StringIO())
    with WorkProgress("verify", show_after_s=0.0, line_every_s=0.0) as progress:
        for text in ("oracle, step 1 of 3", "oracle, step 2 of 3"):
            progress.report(text)
            _wait_for(text, stream)
    lines = [line for line in stream.getvalue().splitlines() if line != "verify (0 s)"]
    assert [re.sub(r"\d+ s", "N s", line) for line in lines] == [
        "verify: oracle, step 1 of 3 (N s)",
        "verify: oracle, step 2 of 3 (N s)",
    ]


def test_lines_that_come_too_soon_are_left_out_but_not_the_latest(monkeypatch):
    stream = _replaced(monkeypatch, io.StringIO())
    with WorkProgress("bench", show_after_s=0.0, line_every_s=0.5) as progress:
        progress.report("round 1")
        _wait_for("round 1", stream)
        for number in range(2, 1000):
            progress.report(f"round {number}")
        _wait_for("round 999", stream)
    assert stream.getvalue().count("round") <= 3


@pytest.mark.parametrize("shown", [{"show_after_s": 1000.0}, {"show_after_s": 0.0, "is_shown": False}])
def test_short_work_and_other_ranks_print_nothing(monkeypatch, shown):
    stream = _replaced(monkeypatch, io.StringIO())
    before = threading.active_count()
    with WorkProgress("plan", **shown) as progress:
        progress.report("searching")
    assert stream.getvalue() == ""
    assert threading.active_count() == before


def test_a_terminal_shows_one_line_and_clears_it(monkeypatch):
    terminal = _replaced(monkeypatch, Terminal())
    monkeypatch.setenv("TERM", "xterm")
    with WorkProgress("memory", show_after_s=0.0) as progress:
        progress.report("a step on [2] ranks")
        _wait_for("memory: a step on [2] ranks", terminal)
    assert terminal.getvalue().rstrip().endswith("\x1b[2K")


def test_reading_shows_bytes(monkeypatch):
    stream = _replaced(monkeypatch, io.StringIO())
    with ReadProgress("Reading", 3_000_000) as progress:
        progress.advance(1_000_000)
        progress.advance(500_000)
        _wait_for("Reading: 1.5 of 3.0 MB", stream)
