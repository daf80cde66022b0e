"""Text of files and users cannot control a terminal, and is else printed unchanged."""

import ast
import logging
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from moefold.cli.main import main
from moefold.errors import ConfigError, RunError
from moefold.terminal import MULTILINE_CHARS, color_labels, print_escaped, printable, wrap_error

RED = "\x1b[31mred\x1b[0m"


@pytest.mark.parametrize(
    ("text", "escaped"),
    [
        ("step-000100", "step-000100"),
        ("ünï 你好 👩\u200d🚀 \\x1b", "ünï 你好 👩\u200d🚀 \\x1b"),
        (RED, "\\x1b[31mred\\x1b[0m"),
        ("a\rb\nc\x9b", "a\\x0db\\x0ac\\x9b"),
        ("\u202etxt.exe\u2028", "\\u202etxt.exe\\u2028"),
        ("\udc80", "\\udc80"),
        ("\U000e0041", "\\U000e0041"),
    ],
)
def test_only_control_characters_of_a_terminal_are_escaped(text, escaped):
    assert printable(text) == escaped
    assert printable(escaped) == escaped
    escaped.encode("utf-8")


def test_lines_are_kept_where_asked():
    assert printable("a\n\tb\x1b", MULTILINE_CHARS) == "a\n\tb\\x1b"


@pytest.mark.parametrize("kind", [ConfigError, RunError])
def test_messages_are_escaped_whoever_prints_them(kind):
    error = kind(f"{RED} is unknown;\nchoose another")
    assert str(error) == "\\x1b[31mred\\x1b[0m is unknown;\nchoose another"
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


@pytest.mark.parametrize(
    "recipe",
    ['["\\u001b[31mrun"]\nx = 1', 'run."\\u001b[31mdir" = "x"', 'run.dir = "\\u001b[31mx/\\u202ey"'],
    ids=["section", "key", "run.dir"],
)
def test_a_recipe_cannot_speak_to_the_terminal(tmp_path, capsys, recipe):
    file = tmp_path / "recipe.toml"
    file.write_text(recipe + "\n")
    (tmp_path / "f").touch()
    words = [f"run.dir={tmp_path}/f/\x1b[31m"] if "dir =" in recipe else []
    assert main(["train", str(file), *words]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.strip().isprintable(), err
    assert "31m" in err


def test_the_name_of_a_checkpoint_cannot_speak_to_the_terminal(tmp_path, capsys):
    checkpoint = tmp_path / "\x1b[31m\u202e" / "step-000001"
    checkpoint.mkdir(parents=True)
    for name in ("moefold.json", ".metadata", "manifest.json"):
        (checkpoint / name).write_text('{"\x1b[2J": 1}')
    for action in ("list", "verify", "show"):
        main(["checkpoint", action, str(checkpoint.parent)])
        out, err = capsys.readouterr()
        text = (out + err).replace("\n", "")
        assert text
        assert text.isprintable(), text


def test_lines_of_the_log_are_escaped():
    program = (
        "from moefold.cli.main import main; import logging; main(['--version']); "
        "logging.getLogger('moefold.data').warning('left out %s', 'a\\x1b[31m')"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stderr == "left out a\\x1b[31m\n"
    assert logging.lastResort is not None


RUNS = (
    ("an unknown_option", ["plan", "mixtral-8x7b", "--gpu", "h100", f"--{RED}"]),
    ("a wrong number", ["plan", "mixtral-8x7b", "--gpu", "h100", "--num-gpus", RED]),
    ("an unknown word", ["checkpoint", RED]),
    ("an unknown command", [RED]),
)


@pytest.mark.parametrize("words", [words for _, words in RUNS], ids=[name for name, _ in RUNS])
def test_messages_about_the_command_line_are_escaped(capsys, words):
    assert main(words) == 2
    err = capsys.readouterr().err
    assert "\\x1b[31mred" in err
    assert err.replace("\n", "").isprintable(), err


def test_tables_and_names_of_written_files_are_escaped(tmp_path, capsys):
    model = tmp_path / f"{RED}.toml"
    model.write_text(
        '[model]\npreset = "mixtral-8x7b"\n[parallel]\nworld_size = 16\n'
        "[train]\nseq_len = 4096\nglobal_batch_size = 64\n"
    )
    recipe = tmp_path / f"{RED}-planned.toml"
    fix = ["--fix", "pp=1", "tp=1", "cp=1", "mbs=1", "zero=3"]
    assert main(["plan", str(model), "--gpu", "h200", *fix, "--recipe", str(recipe)]) == 0
    out, err = capsys.readouterr()
    assert recipe.exists()
    assert f"wrote {printable(recipe)}" in err
    for text in (out, err):
        assert "\\x1b[31mred" in text
        assert text.replace("\n", "").isprintable(), text


def test_commands_print_text_through_one_door():
    """Values that are printed unchanged: constants, JSON, which escapes by itself, and text that was escaped."""
    for file in sorted((Path(__file__).parents[1] / "src" / "moefold" / "cli").glob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "print" and node.args:
                is_plain = isinstance(node.args[0], ast.Constant)
                assert is_plain or ast.unparse(node.args[0]).startswith(("json.dumps(", "printable(")), (
                    file,
                    node.lineno,
                )
            assert not (isinstance(node, ast.Call) and ast.unparse(node.func) in ("argparse.ArgumentParser", "Console"))


@pytest.mark.parametrize(
    ("text", "colored"),
    [
        ("moefold: error: no", "moefold: \x1b[1;31merror\x1b[0m: no"),
        ("done: 3 steps\nnext: moefold", "\x1b[1;32mdone\x1b[0m: 3 steps\n\x1b[1;36mnext\x1b[0m: moefold"),
        ("wrote plan.png", "\x1b[32mwrote\x1b[0m plan.png"),
        ("it is done: so", "it is done: so"),
        ("donest", "donest"),
    ],
)
def test_labels_have_colours_unless_the_user_wants_none(text, colored):
    assert color_labels(text, {"TERM": "xterm", "NO_COLOR": ""}) == colored
    assert color_labels(text, {"TERM": "xterm", "NO_COLOR": "1"}) == text
    assert color_labels(text, {"TERM": "dumb"}) == text


def test_an_error_is_wrapped_between_words_and_a_command_is_not():
    error = "moefold: error: parallel.ep=6 must divide world_size/(etp*pp)=32; choose one of 1, 2, 4, 8, 16, 32"
    lines = wrap_error(error, 40).split("\n")
    assert len(lines) > 1
    assert max(map(len, lines)) <= 40
    assert " ".join(lines) == error
    command = "next: moefold generate runs/quickstart 'The for statement' --chat --max-tokens 100"
    assert wrap_error(command, 40) == command


def test_output_that_is_not_a_terminal_stays_plain(capsys):
    print_escaped("wrote plan.png " + "word " * 50)
    assert capsys.readouterr().out == "wrote plan.png " + "word " * 50 + "\n"
