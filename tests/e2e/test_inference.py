"""A run is trained, evaluated and continued on the command line, under mappings that did not train it."""

import json
import math
import os
import shutil
import sys

import numpy as np
import pytest

from tests.e2e.command import TWO, here, moefold

pytestmark = pytest.mark.e2e


def evaluate(*words: str) -> dict[str, float]:
    """Return the output of `moefold eval --json`, which must be one line and nothing else."""
    done = moefold("eval", *words, "--device", "cpu", "--json")
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    return json.loads(line)


def test_evaluation_is_the_same_under_another_mapping(one_rank, tmp_path):
    ids = np.random.default_rng(0).integers(0, 256, 500).astype(np.uint16)
    np.save(tmp_path / "ids.npy", ids)
    words = [str(one_rank), "--tokens", str(tmp_path / "ids.npy"), "--seq-len", "31"]
    alone = evaluate(*words, "--logits", str(tmp_path / "logits.npy"))
    assert list(alone) == ["loss", "perplexity", "tokens"]
    assert alone["tokens"] == 500 // 31 * 30
    assert alone["perplexity"] == pytest.approx(math.exp(alone["loss"]), rel=1e-12)
    logits = np.load(tmp_path / "logits.npy").astype(np.float64)[:, :-1]
    targets = ids[: 500 // 31 * 31].reshape(-1, 31)[:, 1:]
    chosen = np.take_along_axis(logits, targets[..., None].astype(np.int64), -1)[..., 0]
    assert alone["loss"] == pytest.approx(float((np.log(np.exp(logits).sum(-1)) - chosen).mean()), rel=1e-5)
    assert evaluate(*words, *TWO)["loss"] == pytest.approx(alone["loss"], rel=1e-6)


def test_text_is_read_with_the_models_tokenizer_and_a_person_gets_a_line(one_rank, tmp_path):
    (tmp_path / "text.txt").write_text("é" * 33)
    words = ["eval", str(one_rank / "checkpoints"), "--text", str(tmp_path / "text.txt"), "--seq-len", "32"]
    done = moefold(*words, "--tokenizer", "bytes", "--device", "cpu")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("loss ")
    assert done.stdout.endswith("over 62 tokens in 2 sequences\n")
    assert "2 tokens after the last sequence of 32 are left out" in done.stderr


def test_a_prompt_is_continued_the_same_on_one_rank_and_on_two(one_rank):
    words = ["generate", str(one_rank), "12 7 200", "--max-tokens", "12", "--seed", "3", "--device", "cpu"]
    alone, two = moefold(*words), moefold(*words, *TWO)
    assert (alone.returncode, two.returncode) == (0, 0), alone.stderr + two.stderr
    assert alone.stdout == two.stdout
    assert alone.stdout.startswith("12 7 200 ")
    assert len(alone.stdout.split()) == 3 + 12
    assert alone.stderr == ""


def test_several_prompts_are_objects_and_the_text_of_one_equals_the_stream(one_rank, capsys, monkeypatch):
    words = [str(one_rank), "--temperature", "0", "--max-tokens", "5", "--device", "cpu", "--tokenizer", "bytes"]
    done = moefold("generate", *words, "abc", "zé", "--json")
    assert done.returncode == 0, done.stderr
    records = [json.loads(line) for line in done.stdout.splitlines()]
    assert [record["prompt"] for record in records] == ["abc", "zé"]
    reading, writing = os.pipe()
    os.write(writing, "zé\n".encode())
    os.close(writing)
    with open(reading) as piped:
        monkeypatch.setattr(sys, "stdin", piped)
        streamed = here(capsys, "generate", *words, "--no-echo")
    assert streamed.stdout.rstrip("\n") == records[1]["text"].rstrip("\n")


def test_a_damaged_checkpoint_is_one_message_on_two_ranks(one_rank, tmp_path):
    broken = shutil.copytree(one_rank / "checkpoints" / "step-000020", tmp_path / "step-000020")
    for file in broken.glob("*.distcp"):
        file.write_bytes(file.read_bytes()[:100])
    np.save(tmp_path / "ids.npy", np.zeros(64, dtype=np.int64))
    words = [str(broken), "--tokens", str(tmp_path / "ids.npy"), "--seq-len", "32", "--device", "cpu", "--json"]
    done = moefold("eval", *words, *TWO)
    assert (done.returncode, done.stdout) == (2, "")
    assert "is damaged" in done.stderr
    assert done.stderr.count("\n") == 1
