"""Processes that all have something to say: one is heard, in whatever order they come and go."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from moefold.host.rank_env import RankEnv
from moefold.launch.exit import SingleReporter, has_report

RANK = """
import os, sys, time
from moefold.host.rank_env import RankEnv
from moefold.launch.exit import SingleReporter
rank, file, address = int(sys.argv[1]), sys.argv[2], sys.argv[3]
word = SingleReporter(RankEnv(rank, rank, 8, "127.0.0.1", 1, (file,) if file else ()))
if address:
    word.use_file(address)
print("ready", flush=True)
sys.stdin.readline()
word.report_once(f"rank {rank}", lambda: eval(sys.argv[4]))
print(word.was_reported(), flush=True)
"""


def _place(rank: int, file: str = "") -> RankEnv:
    return RankEnv(rank, rank, 8, "127.0.0.1", 1, (file,) if file else ())


def _start(rank: int, file: str = "", address: str = "", condition: str = "True") -> subprocess.Popen[str]:
    words = [sys.executable, "-c", RANK, str(rank), file, address, condition]
    pipe = subprocess.PIPE
    process = subprocess.Popen(words, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def _let_speak(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def _said(process: subprocess.Popen[str]) -> str:
    output, errors = process.communicate(timeout=60)
    assert output == "True\n"
    return errors


@pytest.mark.parametrize("has_launcher", [True, False])
def test_of_many_at_once_one_is_heard(tmp_path, has_launcher):
    first = SingleReporter(_place(0))
    where = (str(tmp_path / "word"), "") if has_launcher else ("", first.shared_path)
    ranks = [_start(rank, *where) for rank in range(1, 7)]
    for process in ranks:
        _let_speak(process)
    assert sorted(map(_said, ranks))[:-1] == [""] * 5
    assert has_report(tmp_path / "word") == has_launcher


def test_a_rank_that_comes_when_the_others_are_gone_is_silent():
    first = SingleReporter(_place(0))
    late = _start(3, "", first.shared_path)
    early = _start(2, "", first.shared_path)
    _let_speak(early)
    assert _said(early) == "rank 2\n"
    _let_speak(late)
    assert _said(late) == ""


def test_reporter_that_dies_before_reporting_is_replaced(tmp_path):
    first = _start(1, str(tmp_path / "word"), condition="time.sleep(60)")
    _let_speak(first)
    second = _start(2, str(tmp_path / "word"))
    _let_speak(second)
    time.sleep(0.3)
    assert not has_report(tmp_path / "word")
    first.kill()
    first.communicate()
    assert _said(second) == "rank 2\n"


def test_report_of_another_host_is_not_repeated(tmp_path):
    process = _start(1, str(tmp_path / "word"), condition="False")
    _let_speak(process)
    assert _said(process) == ""
    assert has_report(tmp_path / "word")


def test_rank_without_a_shared_file_reports_once(monkeypatch, capsys):
    monkeypatch.delattr("os.memfd_create")
    word = SingleReporter(_place(0))
    assert word.shared_path == ""
    word.report_once("one")
    word.report_once("two")
    assert capsys.readouterr().err == "one\n"


def test_missing_folder_does_not_prevent_the_report(tmp_path: Path, capsys):
    word = SingleReporter(_place(0, str(tmp_path / "gone" / "word")))
    word.report_once("one")
    assert capsys.readouterr().err == "one\n"
    assert not has_report(tmp_path / "gone" / "word")
