"""`moefold rollout`: an error is one message in the words of the command line."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from moefold.cli.main import main
from tests.inference.example import recipe, write_checkpoint

REWARD = """
def length(prompts, completions, **columns):
    return [len(completion) for completion in completions]

def short(prompts, completions, **columns):
    return [2.0 if len(completion) < 4 else None for completion in completions]

def fails(prompts, completions, **columns):
    if any(completions):
        raise ValueError("boom")
    return [0.0 for _ in completions]
"""


@pytest.fixture(scope="module")
def byte_model(pool, tmp_path_factory) -> Path:
    """The run folder of a small Mixtral over bytes."""
    run_dir = tmp_path_factory.mktemp("rollout") / "run"
    cfg = recipe("mixtral", run_dir)
    pool.run(1, write_checkpoint, replace(cfg, model=replace(cfg.model, vocab_size=258)))
    return run_dir


@pytest.fixture
def rollout(byte_model, tmp_path, capsys):
    """Runs the command in a folder with prompts and rewards. Returns (exit status, stdout, stderr)."""
    Path(tmp_path, "prompts.jsonl").write_text('{"prompt": "a"}\n{"prompt": "bc"}\n', encoding="utf-8")
    Path(tmp_path, "reward.py").write_text(REWARD, encoding="utf-8")

    def run(*words: str, reward: str = "length") -> tuple[int, str, str]:
        command = ["rollout", str(byte_model), "--prompts", str(tmp_path / "prompts.jsonl")]
        command += ["--reward", f"{tmp_path / 'reward.py'}:{reward}", "--out", str(tmp_path / "out.jsonl")]
        command += ["--max-tokens", "4", "--samples", "3", "--tokenizer", "bytes", "--device", "cpu", *words]
        status = main(command)
        return status, *capsys.readouterr()

    return run


def test_every_sample_of_every_prompt_has_a_record(rollout, tmp_path):
    words = ["--reward", f"{tmp_path / 'reward.py'}:short", "--reward-weight", "1", "--reward-weight", "0.5"]
    status, out, _ = rollout(*words)
    assert status == 0
    records = [json.loads(line) for line in Path(tmp_path, "out.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [(r["prompt"], r["sample_number"]) for r in records] == [(p, i) for p in ("a", "bc") for i in range(3)]
    assert all(r["rewards"]["length"] == len(r["completion"]) for r in records)
    assert all(r["reward"] == r["rewards"]["length"] + 0.5 * (r["rewards"]["short"] or 0) for r in records)
    summary = json.loads(out)
    assert summary["rewards"]["length"] == pytest.approx(sum(len(r["completion"]) for r in records) / 6)
    assert (summary["prompts"], summary["rollouts"]) == (2, 6)
    assert summary["tokens"] == sum(r["tokens"] for r in records)


@pytest.mark.parametrize("prompts", [["--task", "sort"], ["--prompts", "words.jsonl"]])
def test_words_for_a_model_of_bare_ids_are_refused(pool, tmp_path, capsys, monkeypatch, prompts):
    monkeypatch.chdir(tmp_path)
    Path("words.jsonl").write_text('{"prompt": "sort this"}\n', encoding="utf-8")
    Path("reward.py").write_text(REWARD, encoding="utf-8")
    pool.run(1, write_checkpoint, recipe("mixtral", tmp_path / "ids"))
    reward = ["--reward", "reward.py:length"] if "--prompts" in prompts else []
    assert main(["rollout", "ids", *prompts, *reward, "--out", "out.jsonl", "--device", "cpu"]) == 2
    err = capsys.readouterr().err
    assert "the prompt cannot be tokenised: the model was trained on bare ids" in err
    assert "name its tokenizer with --tokenizer" in err


def test_rows_that_are_no_prompts_are_skipped(rollout, tmp_path, caplog):
    (tmp_path / "more.jsonl").write_text('{"prompt": null}\n{"prompt": "d"}\n', encoding="utf-8")
    words = ["--prompts", str(tmp_path / "more.jsonl")]
    status, _, err = rollout(*words)
    assert (status, "more.jsonl:1: column 'prompt' holds null" in err) == (2, True)
    status, out, _ = rollout(*words, "--skip-bad-rows")
    assert (status, json.loads(out)["prompts"]) == (0, 3)
    assert "--skip-bad-rows: 1 row skipped; the first: " in caplog.text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--cache-gib", "1e-9"], "--cache-gib 1e-09 is smaller than one page"),
        (["--cache-gib", "-1"], "--cache-gib -1 must be at least 0"),
        (["--cache-gib", "0.0004", "--max-tokens", "4000"], "set a larger --cache-gib, or fewer new tokens"),
        (["--slots", "0"], "--slots 0 must be at least 1"),
        (["--count", "3"], "--count 3 must be at most the number of prompts, 2"),
        (
            ["--reward-weight", "1", "--reward-weight", "2"],
            "--reward-weight [1.0, 2.0] must have one number for each of",
        ),
        (["--reward-weight", "nan"], "--reward-weight [nan] must hold numbers of at most 1e+15"),
        (
            ["--kernels", "c", "--dtype", "float64"],
            "--kernels c computes in float32, which --dtype float64 is beyond",
        ),
        (["--temperature", "0"], "--temperature 0 makes all --samples 3 of a prompt equal"),
    ],
)
def test_wrong_options_are_one_message(rollout, words, message):
    status, out, err = rollout(*words)
    assert (status, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1


def test_a_reward_that_fails_is_named_without_a_key_that_the_command_lacks(rollout):
    status, _, err = rollout(reward="fails")
    assert status == 1
    assert "reward.py:fails raised ValueError: boom, for the prompt 'a'" in err
    assert "reward.on_error" not in err


def test_a_checkpoint_that_is_cut_off_is_refused(rollout, byte_model):
    largest = max(byte_model.rglob("*.distcp"), key=lambda file: file.stat().st_size)
    content = largest.read_bytes()
    largest.write_bytes(content[:-1])
    try:
        status, _, error = rollout("parallel.tp=1")
    finally:
        largest.write_bytes(content)
    assert (status, largest.name in error) == (2, True), error
    assert len(error.splitlines()) == 1
