"""`moefold eval`: its refusals, immediately and without torch. Its output is in tests/e2e."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from moefold.cli.main import main
from tests.cli.without_torch import run_calls_without_torch
from tests.inference.checkpoint_folder import described_run


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run with a checkpoint of no tensors, and rows of ids."""
    described_run(tmp_path / "run")
    np.save(tmp_path / "ids.npy", np.arange(64))
    np.save(tmp_path / "float.npy", np.ones(64))
    np.save(tmp_path / "large.npy", np.arange(300))
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9" * 20)
    (tmp_path / "empty").mkdir()
    (tmp_path / "folder.npy").mkdir()
    (tmp_path / "link.npy").symlink_to("ids.npy")
    return tmp_path


WRONG = {
    "{f}/none --tokens {f}/ids.npy --seq-len 8": "MODEL='{f}/none' does not exist",
    "{f}/empty --tokens {f}/ids.npy --seq-len 8": "MODEL='{f}/empty' holds no model",
    "{f}/run --tokens {f}/none.npy --seq-len 8": "--tokens {f}/none.npy does not exist",
    "{f}/run --tokens {f}/float.npy --seq-len 8": "{f}/float.npy holds float64, but token ids are integers",
    "{f}/run --tokens {f}/large.npy --seq-len 8": "holds id 256 at token 256, but the model's vocabulary is 256",
    "{f}/run --text {f}/latin.txt --seq-len 8": "--text {f}/latin.txt is not text in UTF-8",
    "{f}/run --tokens {f}/ids.npy --seq-len 1": "--seq-len 1 must be at least 2",
    "{f}/run --tokens {f}/ids.npy --seq-len 99": "64 tokens, less than one sequence of --seq-len 99",
    "{f}/run --tokens {f}/ids.npy --seq-len 8 --batch-size 0": "--batch-size 0 must be at least 1",
    "{f}/run --tokens {f}/ids.npy --seq-len 8 --dtype half": "--dtype half must be auto or one of",
    "{f}/run --tokens {f}/ids.npy --seq-len 8 parallel.ep=3": "parallel.ep=3 must divide",
    "{f}/run --tokens {f}/ids.npy --seq-len 8 model.ffn.moe.top_k=1": "model.ffn.moe.top_k cannot be set here",
    "{f}/run --tokens {f}/ids.npy --seq-len 8 --logits {f}/out.txt": "must end in .npy",
    "{f}/run --tokens {f}/ids.npy --seq-len 8 --logits {f}/no/out.npy": "the folder '{f}/no' does not exist",
    "{f}/run --text {f}/text.txt --seq-len 8 --logits {f}/ids.npy": "ids.npy exists already; add --force to replace it",
    "{f}/run --tokens {f}/ids.npy --seq-len 8 --logits {f}/o.npy --keep-tail": "leave one out",
    "{f}/run --tokens {f}/ids.npy --seq-len 8 --logits {f}/folder.npy": "--logits {f}/folder.npy is a folder",
    "{f}/run --tokens {f}/ids.npy --seq-len 8 --logits {f}/empty/../ids.npy": "would replace the file that is eval",
    "{f}/run --tokens {f}/ids.npy --seq-len 8 --logits {f}/link.npy": "would replace the file that is eval",
}


@pytest.mark.parametrize("words", WRONG)
def test_invalid_argument_is_one_message(folder, capsys, words):
    assert main(["eval", *words.format(f=folder).split()]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("moefold: error: ")
    assert WRONG[words].format(f=folder) in err
    assert err.count("\n") == 1


def test_logits_larger_than_the_free_disk_space_are_refused(folder, capsys):
    wide, free = folder / "wide", shutil.disk_usage(folder).free
    # Rows no larger than the disk, with logits that are larger.
    described_run(wide, model={"preset": "tiny", "vocab_size": free // (4 * 64) // 4096 * 4096 + 4096})
    words = f"eval {wide} --tokens {folder}/ids.npy --seq-len 8 --logits {folder}/o.npy"
    assert main(words.split()) == 2
    err = capsys.readouterr().err
    assert "GB are free; name a file on another disk" in err
    assert not (folder / "o.npy").exists()


@pytest.mark.parametrize(
    "words", ["--seq-len 8", "", "--tokens a.npy --text b --seq-len 8", "--tokens a.npy --seq-len x"]
)
def test_missing_or_contradictory_arguments(folder, capsys, words):
    assert main(["eval", str(folder / "run"), *words.split()]) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith("moefold eval: error: ")


def test_invalid_arguments_are_reported_without_torch(folder):
    calls = [
        ["eval", "run", "--tokens", "large.npy", "--seq-len", "8"],
        ["generate", "run", "a prompt", "--temperature", "-1"],
        ["generate", "run", "a prompt", "parallel.cp=2"],
        ["lm_eval", "--model_args", "path=run,ep=3", "--tasks", "x"],
    ]
    done = run_calls_without_torch(calls, cwd=folder)
    assert (done.returncode, done.stdout) == (0, "[2, 2, 2, 2]\n")
    errors = done.stderr.splitlines()
    assert [error.startswith("moefold: error: ") for error in errors] == [True] * 4, errors


@pytest.mark.parametrize(
    ("seq_len", "said"), [(48, "--seq-len 48: train.seq_len of the run\n"), (4096, "--seq-len 4096:")]
)
def test_the_length_of_the_run_is_taken_where_none_is_given(tmp_path, capsys, seq_len, said):
    described_run(tmp_path / "run", train={"seq_len": seq_len})
    np.save(tmp_path / "ids.npy", np.zeros(8, dtype=np.int64))
    assert main(["eval", str(tmp_path / "run"), "--tokens", str(tmp_path / "ids.npy")]) == 2
    err = capsys.readouterr().err
    assert err.startswith(said)
    assert f"less than one sequence of --seq-len {seq_len}" in err


@pytest.mark.parametrize(("positions", "seq_len"), [(512, 512), (131072, 2048)])
def test_the_length_of_a_folder_is_bounded_and_said(tmp_path, capsys, positions, seq_len):
    keys = {"model_type": "mixtral", "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
    keys |= {"num_hidden_layers": 1, "intermediate_size": 16, "num_local_experts": 4, "num_experts_per_tok": 2}
    keys |= {"vocab_size": 64, "max_position_embeddings": positions}
    (tmp_path / "config.json").write_text(json.dumps(keys))
    np.save(tmp_path / "ids.npy", np.zeros(8, dtype=np.int64))
    assert main(["eval", str(tmp_path), "--tokens", str(tmp_path / "ids.npy")]) == 2
    said = f"--seq-len {seq_len}: the context length of the model, {positions}, up to 2048\n"
    assert capsys.readouterr().err.startswith(said)


@pytest.mark.parametrize("command", ["eval", "generate", "bench"])
def test_a_device_that_is_not_there_is_answered_with_the_option(folder, capsys, monkeypatch, command):
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    words = {
        "eval": [f"{folder}/run", "--tokens", f"{folder}/ids.npy", "--seq-len", "8"],
        "generate": [f"{folder}/run", "x"],
    }
    assert main([command, *words.get(command, []), "--device", "cuda"]) == 2
    err = capsys.readouterr().err
    assert "run.device" not in err
    assert "set --device cpu" in err
