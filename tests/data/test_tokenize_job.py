"""`moefold tokenize` writes every document once, with any number of processes, and resumes after a kill."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from moefold.config.sections.data import DataConfig
from moefold.data.dataset import DataRequest
from moefold.data.shard_writer import ShardWriter
from moefold.data.token_file import open_document_ends, token_files
from moefold.data.tokenize_job import TokenizationResult, tokenize_files
from moefold.data.validate_source import check_data
from moefold.errors import ConfigError

from .conftest import make_text


def write_jsonl(path: Path, num_lines: int, *, first: int = 0) -> list[str]:
    texts = [make_text(5 + i % 30, i) + "é☃" * (i % 3) for i in range(first, first + num_lines)]
    texts[1] = ""
    path.write_text("\n".join(json.dumps({"text": text, "id": i}) for i, text in enumerate(texts)))
    return [text for text in texts if text]


def tokenize(
    inputs: list[Path],
    out: Path,
    *,
    tokenizer: str = "bytes",
    column: str = "text",
    skip_bad_rows: bool = False,
    **changes: int | str,
) -> TokenizationResult:
    options = {"input_format": "auto", "shard_bytes": 4000, "num_processes": 1} | changes
    writer = ShardWriter(out, tokenizer, column, skip_bad_rows)
    return tokenize_files([str(path) for path in inputs], writer, **options)


def documents(out: Path) -> list[bytes]:
    """The documents of a folder, by its indices."""
    found = []
    for path in sorted(out.glob("*.npy")):
        tokens = np.load(path)
        assert tokens.dtype == np.uint8
        ends = np.fromfile(path.with_suffix(".ends"), dtype="<i8") if path.with_suffix(".ends").stat().st_size else []
        found += [tokens[a:b].tobytes() for a, b in zip([0, *ends], ends, strict=False)]
        assert not len(tokens) or ends[-1] == len(tokens)
    return found


def content(out: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in out.iterdir() if path.suffix in (".npy", ".ends")}


def test_every_document_once_in_order_and_with_its_border(tmp_path: Path):
    texts = write_jsonl(tmp_path / "a.jsonl", 200)
    texts += write_jsonl(tmp_path / "b.jsonl", 7, first=900)
    result = tokenize([tmp_path / "a.jsonl", tmp_path / "b.jsonl"], tmp_path / "out")
    assert documents(tmp_path / "out") == [text.encode() + b"\0" for text in texts]
    assert result.num_documents == len(texts)
    assert result.num_tokens == sum(len(text.encode()) + 1 for text in texts)
    assert result.num_shards > 5


@pytest.mark.parametrize("shard_bytes", [29, 1000, 10**6])
def test_cuts_between_shards_lose_no_line(tmp_path: Path, shard_bytes: int):
    lines = [json.dumps({"text": "x" * (i % 50)}) for i in range(60)]
    (tmp_path / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + "\r\n".join([*lines[:30], "", *lines[30:]]).encode())
    tokenize([tmp_path / "a.jsonl"], tmp_path / "out", shard_bytes=shard_bytes)
    assert documents(tmp_path / "out") == [b"x" * (i % 50) + b"\0" for i in range(60) if i % 50]


def test_a_json_array_is_read_as_lines_are(tmp_path: Path):
    texts = write_jsonl(tmp_path / "a.jsonl", 40)
    rows = [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()]
    (tmp_path / "a.json").write_text("\ufeff" + json.dumps(rows, indent=1))
    (tmp_path / "empty.json").write_text("[]")
    result = tokenize([tmp_path / "a.json", tmp_path / "empty.json"], tmp_path / "out", shard_bytes=300)
    assert documents(tmp_path / "out") == [text.encode() + b"\0" for text in texts]
    assert result.num_skipped == 0


BAD_ROWS = [
    '{"text": null}',
    "null",
    "{",
    '{"txt": "a"}',
    '{"text": ["a"]}',
    '{"text": "\\ud800"}',
    '{"text": "a\\u0000"}',
    '{"text": "\xe9"}',
]


@pytest.mark.parametrize("is_array", [False, True])
def test_rows_without_a_text_are_skipped_and_counted(tmp_path: Path, is_array: bool):
    rows = [row for row in BAD_ROWS if row != "{"] if is_array else BAD_ROWS
    good = ['{"text": "a"}', '{"text": "b"}', '{"text": "c"}']
    lines = [good[0], *rows, good[1], *rows, good[2]]
    path = tmp_path / "a.jsonl"
    text = "[" + ",\n".join(lines) + "]" if is_array else "\n".join(lines)
    path.write_bytes(text.encode() if is_array else text.encode("latin-1"))
    # In latin-1, the last one is not UTF-8; within a JSON array it is a text as any other.
    bad = rows[:-1] if is_array else rows
    out = tmp_path / "out"
    first = f"{path}:2{' (element 2)' if is_array else ''}: column 'text' holds null, not text; fix or remove it"
    with pytest.raises(ConfigError, match=f"^{re.escape(first)}$"):
        tokenize([path], out)
    for _ in range(2):
        result = tokenize([path], out, skip_bad_rows=True, shard_bytes=40)
        assert (result.num_documents, result.num_skipped) == (5 if is_array else 3, 2 * len(bad))
        assert result.first_skipped == first
    with pytest.raises(ConfigError, match="another --skip-bad-rows"):
        tokenize([path], out, shard_bytes=40)
    with pytest.raises(ConfigError, match=r"no row of INPUT holds a text: .*a.jsonl:1.*: no column 'txet'"):
        tokenize([path], tmp_path / "wrong", column="txet", skip_bad_rows=True)
    assert tokenize([path], tmp_path / "wrong", skip_bad_rows=True).num_skipped == 2 * len(bad)


@pytest.mark.parametrize("text", ["[]", '{"text": ""}\n'])
def test_input_without_a_text_is_refused_and_leaves_nothing(tmp_path: Path, text: str):
    (tmp_path / "a.jsonl").write_text(text)
    with pytest.raises(ConfigError, match="no row of INPUT holds a text: its rows and files are empty"):
        tokenize([tmp_path / "a.jsonl"], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_skipping_rows_of_plain_text_is_refused(tmp_path: Path):
    (tmp_path / "a.txt").write_text("a")
    with pytest.raises(ConfigError, match="--skip-bad-rows has no effect"):
        tokenize([tmp_path / "a.txt"], tmp_path / "out", skip_bad_rows=True)


def test_processes_change_nothing(tmp_path: Path, make_tokenizer_file: Callable[..., Path]):
    write_jsonl(tmp_path / "a.jsonl", 300)
    tokenizer = str(make_tokenizer_file("</s>"))
    for processes in (1, 2):
        tokenize([tmp_path / "a.jsonl"], tmp_path / str(processes), tokenizer=tokenizer, num_processes=processes)
    one, two = content(tmp_path / "1"), content(tmp_path / "2")
    assert len(one) > 10
    assert one == two
    assert np.load(tmp_path / "1" / "tokens-000000.npy").dtype == np.uint16


def test_text_files_are_documents_and_parquet_rows_are(tmp_path: Path, text_folder: Path):
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow

    rows = [make_text(20, i) for i in range(40)]
    parquet.write_table(pyarrow.table({"id": range(40), "body": rows}), tmp_path / "a.parquet", row_group_size=7)
    tokenize([tmp_path / "a.parquet"], tmp_path / "rows", column="body", shard_bytes=1500)
    assert documents(tmp_path / "rows") == [row.encode() + b"\0" for row in rows]
    assert len(content(tmp_path / "rows")) > 4
    tokenize([text_folder], tmp_path / "files")
    files = [text_folder / name for name in ("a.txt", "b.txt", "inner/c.txt")]
    assert documents(tmp_path / "files") == [file.read_bytes() + b"\0" for file in files]
    with pytest.raises(ConfigError, match="no column 'bodi'; did you mean 'body'"):
        tokenize([tmp_path / "a.parquet"], tmp_path / "none", column="bodi")


def test_a_run_reads_the_tokens_and_masks_by_the_index(tmp_path: Path):
    write_jsonl(tmp_path / "a.jsonl", 200)
    out = tmp_path / "out"
    tokenize([tmp_path / "a.jsonl"], out)
    data = DataConfig(kind="tokens", path=str(out), shuffle=False, validation_fraction=0.0, document_index=True)
    check_data(DataRequest(data, seq_len=64, vocab_size=256, seed=0))
    row = DataRequest(data, seq_len=64, vocab_size=256, seed=0).open().train
    joined = b"".join(documents(out))
    for i in range(len(row)):
        sample = row.annotated_sample(i)
        assert sample.tokens.astype(np.uint8).tobytes() == joined[i * 64 : i * 64 + 65]
        is_end = sample.tokens[:-1] == 0
        assert (np.diff(sample.document_ids) == is_end).all()
    next(out.glob("*.ends")).unlink()
    with pytest.raises(ConfigError, match=r"data.document_index=true needs an index .* data.document_end"):
        check_data(DataRequest(data, seq_len=64, vocab_size=256, seed=0))


def test_finished_files_stay_and_the_rest_is_made(tmp_path: Path):
    write_jsonl(tmp_path / "a.jsonl", 200)
    out = tmp_path / "out"
    tokenize([tmp_path / "a.jsonl"], out)
    whole = content(out)
    kept = (out / "tokens-000000.npy").stat().st_mtime_ns
    # As a kill leaves it: a shard without its tokens, another half written, a draft.
    (out / "tokens-000001.npy").unlink()
    (out / "tokens-000002.npy").write_bytes(whole["tokens-000002.npy"][:-9])
    (out / ".tokens-000003.x.partial").write_bytes(b"x")
    note = json.loads((out / "tokenize.json").read_text())
    (out / "tokenize.json").write_text(json.dumps(note | {"is_complete": False}))
    with pytest.raises(ConfigError, match="is not finished"):
        check_data(DataRequest(DataConfig(kind="tokens", path=str(out)), seq_len=64, vocab_size=256, seed=0))
    result = tokenize([tmp_path / "a.jsonl"], out, num_processes=2)
    assert content(out) == whole
    assert not list(out.glob("*.partial"))
    assert (out / "tokens-000000.npy").stat().st_mtime_ns == kept
    new = sum(len(np.load(out / f"tokens-00000{i}.npy")) for i in (1, 2))
    assert result.num_new_tokens == new < result.num_tokens
    assert tokenize([tmp_path / "a.jsonl"], out).num_new_tokens == 0


def test_killed_command_resumes_where_it_was(tmp_path: Path):
    write_jsonl(tmp_path / "a.jsonl", 20_000)
    out = tmp_path / "out"
    words = [sys.executable, "-m", "moefold", "tokenize", str(tmp_path / "a.jsonl"), "--tokenizer", "bytes"]
    words += ["--shard-mb", "1", "--processes", "2"]
    process = subprocess.Popen([*words, "--out", str(out)])
    deadline = time.monotonic() + 60
    while not list(out.glob("*.npy")):
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    first = min(out.glob("*.npy"))
    stamp = first.stat().st_mtime_ns
    subprocess.run([*words, "--out", str(out)], check=True, timeout=120)
    tokenize([tmp_path / "a.jsonl"], tmp_path / "whole", shard_bytes=10**6)
    assert first.stat().st_mtime_ns == stamp
    assert content(out) == content(tmp_path / "whole")


@pytest.mark.parametrize(
    ("line", "words", "processes"),
    [
        ('{"text": 1}', r"a.jsonl:151: column 'text' holds a number", 1),
        ('{"txet": "a"}', r"a.jsonl:151: no column 'text'; did you mean 'txet'", 1),
        ("{", r"a.jsonl:151 is not JSON", 2),
    ],
)
def test_wrong_input_is_named_with_its_line_in_the_whole_file(tmp_path: Path, line: str, words: str, processes: int):
    path = tmp_path / "a.jsonl"
    write_jsonl(path, 200)
    lines = path.read_text().split("\n")
    path.write_text("\n".join([*lines[:150], line, *lines[150:]]))
    with pytest.raises(ConfigError, match=words):
        tokenize([path], tmp_path / "out", num_processes=processes)
    assert not list((tmp_path / "out").glob("*.partial"))


def test_a_folder_of_something_else_is_not_changed(tmp_path: Path):
    write_jsonl(tmp_path / "a.jsonl", 9)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "letter.txt").write_text("mine")
    with pytest.raises(ConfigError, match="is not empty"):
        tokenize([tmp_path / "a.jsonl"], tmp_path / "full")
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["letter.txt"]
    tokenize([tmp_path / "a.jsonl"], tmp_path / "out")
    before = content(tmp_path / "out")
    with pytest.raises(ConfigError, match="another --shard-mb"):
        tokenize([tmp_path / "a.jsonl"], tmp_path / "out", shard_bytes=77)
    write_jsonl(tmp_path / "a.jsonl", 11)
    with pytest.raises(ConfigError, match="other input files, or files that changed"):
        tokenize([tmp_path / "a.jsonl"], tmp_path / "out")
    assert content(tmp_path / "out") == before


@pytest.mark.parametrize("note", ["[]", "3", "nonsense", "[" * 100_000])
def test_a_broken_note_is_named(tmp_path: Path, note: str):
    write_jsonl(tmp_path / "a.jsonl", 5)
    tokenize([tmp_path / "a.jsonl"], tmp_path / "out")
    (tmp_path / "out" / "tokenize.json").write_text(note)
    with pytest.raises(ConfigError, match="out/tokenize.json is broken"):
        tokenize([tmp_path / "a.jsonl"], tmp_path / "out")
    with pytest.raises(ConfigError, match="out/tokenize.json is broken"):
        token_files(DataConfig(kind="tokens", path=str(tmp_path / "out")))


def test_call_that_wrote_nothing_does_not_fix_the_input(tmp_path: Path):
    texts = write_jsonl(tmp_path / "a.jsonl", 9)
    with pytest.raises(ConfigError, match="no column 'txt'; did you mean 'text'"):
        tokenize([tmp_path / "a.jsonl"], tmp_path / "out", column="txt")
    assert tokenize([tmp_path / "a.jsonl"], tmp_path / "out").num_documents == len(texts)


def test_tokens_may_lie_in_the_folder_that_they_are_made_of(tmp_path: Path):
    texts = write_jsonl(tmp_path / "a.jsonl", 9)
    out = tmp_path / "tokens"
    for num_new in (sum(len(text.encode()) + 1 for text in texts), 0):
        assert tokenize([tmp_path], out).num_new_tokens == num_new
    assert documents(out) == [text.encode() + b"\0" for text in texts]
    for inside in (out, out / "tokens-000000.npy"):
        with pytest.raises(ConfigError, match=f"INPUT {inside} lies in --out .*; choose another folder"):
            tokenize([inside], out)


def test_an_unreadable_input_is_not_blamed_on_the_output(tmp_path: Path):
    pyarrow = pytest.importorskip("pyarrow")
    pyarrow.parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "a.parquet"
    table = pyarrow.table({"text": [f"t{i}" for i in range(40)]})
    pyarrow.parquet.write_table(table, path, row_group_size=20, compression="NONE")
    start = pyarrow.parquet.ParquetFile(path).metadata.row_group(1).column(0).dictionary_page_offset
    content = bytearray(path.read_bytes())
    content[start : start + 4] = b"\xff" * 4
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="^[^ ]*a.parquet is damaged after row 20"):
        tokenize([path], tmp_path / "out", shard_bytes=100)
    assert not list((tmp_path / "out").glob(".tokens-*"))


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path):
    write_jsonl(tmp_path / "a.jsonl", 60)
    tokenize([tmp_path / "a.jsonl"], tmp_path / "out", shard_bytes=1000)
    for number in (1, 2):
        (tmp_path / "out" / f"tokens-00000{number}.npy").unlink()
    # A folder stands where a shard has to go: so it fails for root, too.
    (tmp_path / "out" / "tokens-000001.npy" / "x").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"--out .*out cannot be written \(.*irectory\); choose another folder"):
        tokenize([tmp_path / "a.jsonl"], tmp_path / "out", shard_bytes=1000)


@pytest.mark.parametrize("ends", [[500], [10], [50, 10, 100], [-5, 100]])
def test_an_index_of_other_tokens_is_refused(tmp_path: Path, ends: list[int]):
    path = tmp_path / "a.npy"
    np.save(path, np.zeros(100, np.uint8))
    np.array(ends, "<i8").tofile(path.with_suffix(".ends"))
    with pytest.raises(ConfigError, match="a.ends is not an index of the 100 tokens of a.npy"):
        open_document_ends(path, 100)


def test_token_files_know_their_tokenizer(
    tmp_path: Path, make_tokenizer_file: Callable[..., Path], caplog: pytest.LogCaptureFixture
):
    """It is known by the vocabulary and rules: a file that is written again is the same, another vocabulary is not."""
    import tokenizers

    (tmp_path / "a.txt").write_text(make_text(400))
    made, other = make_tokenizer_file("</s>"), make_tokenizer_file("<eos>")
    again = tmp_path / "again.json"
    again.write_text(json.dumps(json.loads(tokenizers.Tokenizer.from_file(str(made)).to_str()), indent=3))
    writer = ShardWriter(tmp_path / "out", str(made), "text")
    tokenize_files([str(tmp_path / "a.txt")], writer, input_format="text", shard_bytes=10**6, num_processes=1)
    data = DataConfig(kind="tokens", path=str(tmp_path / "out"))
    check_data(DataRequest(data, seq_len=8, vocab_size=400, seed=0))
    for file in (made, again):
        check_data(DataRequest(replace(data, tokenizer=str(file)), seq_len=8, vocab_size=400, seed=0))
    for name, size in ((str(other), 400), ("bytes", 256)):
        with pytest.raises(ConfigError, match=r"is not the tokenizer that made the ids of .*out: .*tokenizer.json"):
            check_data(DataRequest(replace(data, tokenizer=name), seq_len=8, vocab_size=size, seed=0))
    np.save(tmp_path / "bare.npy", np.arange(100))
    bare = DataConfig(kind="tokens", path=str(tmp_path / "bare.npy"), tokenizer=str(made))
    DataRequest(bare, seq_len=8, vocab_size=400, seed=0).prepare()
    assert "does not say which tokenizer made its ids" in caplog.text
