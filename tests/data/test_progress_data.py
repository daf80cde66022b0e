import sys
import time

import pytest

from moefold.data import worker_pool
from moefold.data.worker_pool import ReadProgress


def test_short_work_prints_nothing(capsys: pytest.CaptureFixture[str]):
    with ReadProgress("Reading", 100) as shown:
        shown.advance(100)
    assert capsys.readouterr() == ("", "")


def test_long_work_prints_plain_lines_into_a_file(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(worker_pool, "_FIRST_UPDATE_S", 0.0)
    with ReadProgress("Reading", 3_000_000) as shown:
        shown.advance(1_000_000)
        shown.advance(1_000_000)
    assert capsys.readouterr().err == "Reading: 1.0 of 3.0 MB\n"


def test_hidden_work_prints_nothing(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(worker_pool, "_FIRST_UPDATE_S", 0.0)
    with ReadProgress("Reading", 100, is_shown=False) as shown:
        shown.advance(50)
    assert capsys.readouterr().err == ""


def test_a_terminal_gets_a_bar(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(worker_pool, "_FIRST_UPDATE_S", 0.0)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    with ReadProgress("Reading", 3_000_000) as shown:
        shown.advance(1_000_000)
        shown.advance(500_000)
        time.sleep(0.15)
    output = capsys.readouterr().err
    assert "Reading" in output
    assert "1.5/3.0 MB" in output
