"""`moefold generate`: its refusals, and the source of the prompt. Its output is in tests/e2e."""

import io
import sys
from pathlib import Path

import pytest

from moefold.cli.generate import is_override
from moefold.cli.main import main
from tests.inference.checkpoint_folder import described_run


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run with a checkpoint of no tensors."""
    described_run(tmp_path)
    return tmp_path


WRONG = {
    "{run}/nowhere x": "does not exist",
    "{run} x --max-tokens 0": "--max-tokens 0 must be at least 1",
    "{run} x --temperature -0.5": "--temperature -0.5 must be at least 0",
    "{run} x --top-p 0": "--top-p 0 must lie in (0, 1]",
    "{run} x --top-k -2": "--top-k -2 must be at least 0",
    "{run} x --temperature 0 --top-p 0.5": "have no effect",
    "{run} x parallel.cp=2": "parallel.cp=2 cannot generate",
    "{run} x --cache-gib -1": "--cache-gib -1 must be at least 0",
    "{run} x --cache-gib 1e-9": "--cache-gib 1e-09 is smaller than one page of 64 tokens",
    "{run} x --max-tokens 1000000 --cache-gib 0.01": "set a larger --cache-gib, or fewer new tokens",
    "{run} x parallel.zero=1": "parallel.zero has no effect here",
    "{run} x moe.eval_capacity_factor=1": "moe.eval_capacity_factor cannot be set here",
    "{run} x paralel.tp=2": "did you mean [parallel]",
    "{run} x parallel.tpp=2": "did you mean parallel.tp",
    "{run} caf\udce9": "the prompt is not Unicode text",
    "{run} x --tokenizer nowhere.json": "--tokenizer nowhere.json does not exist",
    "{run} x --tokenizer gpt2": "'hf://gpt2' downloads it",
    "{run} x --chat-template t.jinja": "--chat-template has no effect without --chat",
    "{run} x --chat --chat-template none.jinja": "--chat-template none.jinja does not exist",
}


@pytest.mark.parametrize("words", WRONG)
def test_invalid_argument_is_one_message(run_dir, capsys, words):
    assert main(["generate", *words.format(run=run_dir).split()]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("moefold: error: ")
    assert WRONG[words] in err
    assert err.count("\n") == 1


def test_a_prompt_that_is_not_there_or_no_text(run_dir, capsys, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(sys, "stdin", Terminal())
    assert main(["generate", str(run_dir)]) == 2
    assert "a prompt is missing: moefold generate MODEL" in capsys.readouterr().err
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9"), encoding="utf-8"))
    assert main(["generate", str(run_dir)]) == 2
    assert "is not text in UTF-8" in capsys.readouterr().err


def test_bytes_that_a_locale_lets_through_are_no_prompt(run_dir, capsys, monkeypatch):
    lenient = io.TextIOWrapper(io.BytesIO(b"caf\xe9"), encoding="ascii", errors="surrogateescape")
    monkeypatch.setattr(sys, "stdin", lenient)
    assert main(["generate", str(run_dir)]) == 2
    assert "is not text in UTF-8 (unexpected end of data, byte 3)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("word", "is_setting"),
    [
        ("parallel.tp=2", True),
        ("paralel.tp=2", True),
        ("moe.eval_capacity_factor=1", True),
        ("os.path=1", False),
        ("parser.add=x", False),
        ("model.tp=2", False),
        ("a parallel.tp=2", False),
        ("parallel.tp = 2", False),
    ],
)
def test_arguments_that_are_no_mapping_are_prompts(word, is_setting):
    assert is_override(word) == is_setting


def test_ranks_of_a_launcher_have_no_standard_input(run_dir, capsys, monkeypatch):
    for name, value in {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "x", "MASTER_PORT": 1}.items():
        monkeypatch.setenv(name, str(value))
    assert main(["generate", str(run_dir)]) == 2
    assert "ranks of a launcher share no standard input" in capsys.readouterr().err
