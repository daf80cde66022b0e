"""`moefold train` on the data of the ecosystem: conversations, streams that resume, tokens of `moefold tokenize`."""

import json
from pathlib import Path

import pytest

from tests.e2e.command import checkpoints, losses, metrics, moefold, small, train

pytestmark = pytest.mark.e2e
CP_EP = ("parallel.world_size=2", "parallel.cp=2", "parallel.ep=2")


def _rows(path: Path, count: int) -> Path:
    with path.open("w") as file:
        for i in range(count):
            file.write(json.dumps({"text": f"row {i} says {i * i}; " * (1 + i % 9)}) + "\n")
    return path


def test_fine_tuning_from_the_command_line(tmp_path: Path):
    chats = tmp_path / "chats.jsonl"
    with chats.open("w") as file:
        for i in range(60):
            file.write(json.dumps({"prompt": f"{i}+1?", "response": f"It is {i + 1}."}) + "\n")
        file.write(json.dumps({"messages": [{"role": "user", "content": "Hello?"}]}) + "\n")
    words = ("data.kind=sft", f"data.path={chats}", "train.seq_len=128", "run.steps=12", "train.eval_every=12")
    one = train(tmp_path / "one", *words)
    assert "61 conversations, 1 skipped without a response" in one.stderr
    train(tmp_path / "two", *words, "run.steps=4", *CP_EP)
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one")[:4], rel=1e-4)
    assert losses(tmp_path / "one")[-1] < losses(tmp_path / "one")[0] - 0.5
    assert metrics(tmp_path / "one")[-1]["eval_loss"] < losses(tmp_path / "one")[0]


def test_stream_resumes_where_it_was(tmp_path: Path):
    pytest.importorskip("datasets")
    paths = [str(_rows(tmp_path / name, 400)) for name in ("a.jsonl", "b.jsonl")]
    words = ("data.kind=huggingface", f"data.path={json.dumps(paths)}", "data.weights=[1, 3]", "data.streaming=true")
    words += ("parallel.world_size=2", "checkpoint.every=3", "train.lr_schedule=constant")
    train(tmp_path / "whole", *words, "run.steps=6")
    train(tmp_path / "halves", *words, "run.steps=3")
    meta = json.loads((tmp_path / "halves" / "checkpoints" / "step-000003" / "moefold.json").read_text())
    assert len(meta["states"]["data"]["stream"]) == 2
    train(tmp_path / "halves", *words, "run.steps=6", "parallel.world_size=1")
    assert checkpoints(tmp_path / "halves") == ["step-000003", "step-000006"]
    assert losses(tmp_path / "halves") == pytest.approx(losses(tmp_path / "whole"), rel=1e-5)


def test_tokenize_and_train_with_its_documents(tmp_path: Path):
    rows = _rows(tmp_path / "a.jsonl", 300)
    done = moefold("tokenize", str(rows), "--out", str(tmp_path / "tokens"), "--tokenizer", "bytes", "--processes", "2")
    assert done.returncode == 0, done.stderr
    assert "300 documents" in done.stdout
    words = ("data.kind=tokens", f"data.path={tmp_path / 'tokens'}", "data.document_index=true", "run.steps=2")
    train(tmp_path / "index", *words)
    train(tmp_path / "ends", *words[:2], "data.document_end=0", "run.steps=2")
    assert losses(tmp_path / "index") == losses(tmp_path / "ends")


def test_wrong_data_is_refused_with_its_line(tmp_path: Path):
    (tmp_path / "bad.jsonl").write_text('{"messages": [{"content": "hi"}]}\n')
    refused = moefold(*small(tmp_path / "run", "data.kind=sft", f"data.path={tmp_path / 'bad.jsonl'}"))
    assert refused.returncode == 2
    assert f"{tmp_path / 'bad.jsonl'}:1: message 1 has no role" in refused.stderr
