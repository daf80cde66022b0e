"""Test the entry point of all commands: help, unknown commands, exit status, and the cost of its imports."""

import importlib
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import moefold
from moefold.cli.main import COMMANDS, main
from tests.cli.without_torch import run_calls_without_torch
from tests.clock import processor_s

RECIPES = Path(__file__).parents[2] / "recipes"


def run_main(*words: str) -> subprocess.CompletedProcess[str]:
    program = "import sys; from moefold.cli.main import main; sys.exit(main())"
    return subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True, timeout=60)


def stand_in(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    """Put a command in place of `layout` that ends in `error`."""

    def run(argv: list[str]) -> int:
        raise error

    module = ModuleType("moefold.cli.layout")
    module.run = run
    monkeypatch.setitem(sys.modules, "moefold.cli.layout", module)


def test_no_command_prints_the_help_on_stderr(capsys):
    assert main([]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("usage: moefold")


@pytest.mark.parametrize("word", ["-h", "--help"])
def test_help_names_every_command(capsys, word):
    assert main([word]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    on_one_line = " ".join(out.split())
    assert all(f"\n  {name} " in out and f" {name} {words} " in on_one_line for name, words in COMMANDS.items())
    assert all(len(line) <= 80 for line in out.splitlines())


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"moefold {moefold.__version__}\n"


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("trian", "moefold: error: unknown command 'trian'; did you mean 'train'?\n"),
        ("lengths", "moefold: error: moefold lengths is moefold simulate RECIPE --lengths NAME now\n"),
        ("zzz", f"moefold: error: unknown command 'zzz'; the commands are {', '.join(COMMANDS)}\n"),
    ],
)
def test_an_unknown_command_suggests_the_nearest(capsys, word, message):
    assert main([word]) == 2
    assert capsys.readouterr() == ("", message)


def test_an_unknown_option_is_one_message(capsys):
    assert main(["--frobnicate"]) == 2
    assert capsys.readouterr().err == (
        "moefold: error: unrecognized arguments: --frobnicate; `moefold --help` explains the arguments\n"
    )


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["plan", "mixtral-8x7b", "--gpu", "h100", "--gpus", "8"], "moefold calls this --num-gpus"),
        (["layout", "tp=2", "--tensor-parallel-size", "8"], "moefold calls this parallel.tp"),
        (["plan", "tiny", "--gpu", "h100", "--jsn"], "did you mean --json?"),
        (["layout", "tp=2", "--frobnicate"], "`moefold layout --help` explains the arguments"),
    ],
)
def test_an_unknown_option_of_a_command_names_the_right_one(capsys, words, hint):
    assert main(words) == 2
    err = capsys.readouterr().err
    assert err.endswith(f"; {hint}\n")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["eval"], "one of the arguments --tokens --text is required"),
        (["checkpoint", "show"], "the following arguments are required: CKPT"),
        (["export", "--frobnicate", "a\nb"], "the following arguments are required: "),
    ],
)
def test_missing_arguments_are_one_line(capsys, words, message):
    assert main(words) == 2
    err = capsys.readouterr().err
    assert f" error: {message}" in err
    assert err.count("\n") == 1
    assert f"{words[0]} " in err.split("`moefold ")[1]


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(capsys, name):
    assert main([name, "--help"]) == 0
    assert capsys.readouterr().out.startswith(f"usage: moefold {name}")


@pytest.mark.parametrize(("given", "name"), [("lm_eval", "lm-eval"), ("plan_accuracy", "plan-accuracy")])
def test_a_command_is_known_with_underscores_too(capsys, given, name):
    assert main([given, "--help"]) == 0
    assert capsys.readouterr().out.startswith(f"usage: moefold {name}")


def test_command_gets_its_arguments_and_returns_its_status(capsys):
    assert main(["layout", "world_size=2", "tp=2", "--json"]) == 0
    assert '"tp": [[0, 1]]' in capsys.readouterr().out


def test_a_user_error_is_one_message_and_status_2(capsys):
    assert main(["layout", "world_size=8", "tp=3"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("moefold: error: parallel.tp=3 must divide world_size/pp=8; choose one of 1, 2, 4, 8")
    assert len(err.splitlines()) == 1


def test_an_interrupt_ends_with_130(monkeypatch, capsys):
    stand_in(monkeypatch, KeyboardInterrupt())
    assert main(["layout"]) == 130
    assert capsys.readouterr().err == "moefold: interrupted\n"


@pytest.mark.parametrize(("code", "status"), [(0, 0), (3, 3), (None, 0)])
def test_a_command_that_leaves_by_itself_keeps_its_status(monkeypatch, code, status):
    stand_in(monkeypatch, SystemExit(code))
    assert main(["layout"]) == status


def test_a_bug_of_ours_is_not_hidden(monkeypatch):
    stand_in(monkeypatch, RuntimeError("a bug"))
    with pytest.raises(RuntimeError, match="a bug"):
        main(["layout"])


def test_closed_output_pipe_is_not_an_error():
    read_end, write_end = os.pipe()
    os.close(read_end)
    program = "import sys; from moefold.cli.main import main; sys.exit(main())"
    with os.fdopen(write_end, "w") as closed:
        done = subprocess.run(
            [sys.executable, "-c", program, "layout", "world_size=64", "tp=8", "--json"],
            stdout=closed,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
        )
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("more", [["--json"], []])
def test_a_full_standard_output_is_one_line(more):
    program = "import sys; from moefold.cli.main import main; sys.exit(main())"
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-c", program, "layout", "world_size=64", "tp=8", *more],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
        )
    assert done.stderr == "moefold: error: standard output cannot be written: No space left on device\n"
    assert done.returncode == 1


def test_help_of_all_commands_imports_no_schema():
    # -S: no other package of this environment imports the missing module.
    heavy = ["moefold.config.schema", "pydantic", "importlib.metadata"]
    program = f"import sys; from moefold.cli.main import main; main(); print([m for m in {heavy} if m in sys.modules])"
    source = {**os.environ, "PYTHONPATH": str(Path(moefold.__file__).parents[1])}
    asked = [sys.executable, "-S", "-c", program, "--help"]
    done = subprocess.run(asked, capture_output=True, text=True, timeout=60, env=source)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "[]"), done.stderr


HELP_OF_EACH_COMMAND = """
import os
import sys
import moefold.convert.families.families
import moefold.planner.planner
import moefold.train.start
from moefold.cli.main import COMMANDS, main
modules = {name: "moefold.cli." + name.replace("-", "_") for name in COMMANDS}
for name in COMMANDS:
    child = os.fork()
    if not child:
        sys.stdout = open(os.devnull, "w")
        status = main([name, "--help"])
        found = [other for other in ("torch", *modules.values()) if other in sys.modules]
        print(name, status, *found, file=sys.stderr, flush=True)
        os._exit(0)
    os.waitpid(child, 0)
"""


def test_commands_import_torch_and_each_other_only_when_they_work():
    """Each in a fork of an interpreter that has imported no command yet, only the modules that many of them share."""
    words = [sys.executable, "-c", HELP_OF_EACH_COMMAND]
    done = subprocess.run(words, capture_output=True, text=True, timeout=240)
    expected = [f"{name} 0 moefold.cli.{name.replace('-', '_')}" for name in COMMANDS]
    assert done.stderr.splitlines() == expected


WRONG_RECIPES = {
    "train.lrr=1": "unknown key train.lrr; did you mean train.lr?",
    "run.steps=two": "run.steps='two' must be an integer",
    "parallel.tp=3": "parallel.tp=3 must divide world_size/pp=4; choose one of 1, 2, 4",
    "model.ffn.moe.num_experts=6": "parallel.ep=4 must divide model.ffn.moe.num_experts=6",
    "train.seq_len=250": "train.seq_len=250 must be divisible by cp*tp=2*2=4; choose 248 or 252",
}


@pytest.mark.parametrize("name", ["train", pytest.param("verify", marks=pytest.mark.slow)])
def test_a_wrong_recipe_a_layout_and_a_simulation_are_answered_without_torch(name):
    """All of them in one interpreter of its own, where none imports torch."""
    recipe = str(RECIPES / "quickstart.toml")
    calls = [[name, recipe, word] for word in WRONG_RECIPES]
    done = run_calls_without_torch([*calls, ["layout", "world_size=8", "tp=2"], ["simulate", recipe]])
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, f"{[*[2] * len(calls), 0, 0]}")
    errors = done.stderr.splitlines()
    for error, message in zip(errors, WRONG_RECIPES.values(), strict=True):
        assert error.startswith(f"moefold: error: {message}")


def test_a_wrong_recipe_is_answered_within_two_seconds():
    before_s = processor_s()
    assert run_main("train", str(RECIPES / "quickstart.toml"), "train.lrr=1").returncode == 2
    assert processor_s() - before_s < 2


def test_every_command_is_a_module_with_run():
    assert all(callable(importlib.import_module(f"moefold.cli.{name.replace('-', '_')}").run) for name in COMMANDS)
