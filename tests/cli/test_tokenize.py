"""`moefold tokenize` as a user sees it."""

import json
from pathlib import Path

import pytest

from moefold.cli.main import main


def test_it_reports_its_files_and_resumes(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    rows = [json.dumps({"body": "x" * i}) for i in range(1, 20)]
    (tmp_path / "a.jsonl").write_text("\n".join(rows))
    words = ["tokenize", str(tmp_path / "a.jsonl"), "--out", str(tmp_path / "out"), "--tokenizer", "bytes"]
    words += ["--column", "body", "--processes", "1"]
    assert main(words) == 0
    assert "19 documents, 209 tokens in 1 shards; 209 of them new" in capsys.readouterr().out
    assert main(words) == 0
    assert "209 tokens in 1 shards; 0 of them new" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["missing.jsonl"], "INPUT='missing.jsonl' does not exist"),
        (["a.jsonl", "--column", "txt"], "a.jsonl:1: no column 'txt'; did you mean 'text'"),
        (["a.jsonl", "--tokenizer", "none.json"], "--tokenizer none.json does not exist"),
        (["a.jsonl", "--processes", "0"], "--processes 0 must be at least 1"),
        (["a.jsonl", "--shard-mb", "0"], "--shard-mb 0 must be at least 1"),
        (["a.jsonl", "--format", "parquet"], "a.jsonl is not a complete parquet file"),
        (["empty.txt"], "holds no file with anything in it"),
    ],
)
def test_user_errors(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    message: str,
):
    monkeypatch.chdir(tmp_path)
    Path("a.jsonl").write_text('{"text": "a"}\n')
    Path("empty.txt").touch()
    assert main(["tokenize", "--tokenizer", "bytes", "--out", "out", *words]) == 2
    assert message in capsys.readouterr().err


def test_binary_files_of_a_folder_are_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.txt").write_text("abc")
    (tmp_path / "in" / "lib.so").write_bytes(b"\x7fELF\0\0")
    words = ["--out", str(tmp_path / "out"), "--tokenizer", "bytes", "--processes", "1"]
    assert main(["tokenize", str(tmp_path / "in"), *words]) == 0
    assert "1 documents, 4 tokens" in capsys.readouterr().out
    assert f"left out {tmp_path / 'in' / 'lib.so'}, which is not text" in caplog.text
    words[1] = str(tmp_path / "other")
    assert main(["tokenize", str(tmp_path / "in" / "lib.so"), *words]) == 2
    err = capsys.readouterr().err
    assert "lib.so is not text" in err
    assert "data.path" not in err
    assert not (tmp_path / "other").exists()


def test_a_folder_that_was_there_stays_when_nothing_comes_of_it(tmp_path: Path):
    (tmp_path / "a.jsonl").write_text("{}\n")
    (tmp_path / "out").mkdir()
    assert main(["tokenize", str(tmp_path / "a.jsonl"), "--out", str(tmp_path / "out"), "--tokenizer", "bytes"]) == 2
    assert (tmp_path / "out").is_dir()
