"""Errors have a problem with fields, and the names that their caller gives to settings."""

import ast
import importlib
import pickle
import re
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from multiprocessing import get_context
from pathlib import Path

import pytest

import moefold
from moefold.cli.main import COMMANDS
from moefold.config.keys.paths import key_types, sections
from moefold.errors import ConfigError, raise_all
from moefold.message_text import Problem, Setting, first_line, keep_names, spelled_as

SOURCE = Path(moefold.__file__).parent
OPTIONS = {"data.tokenizer": "--tokenizer", "data.path": "INPUT", "run.dtype": "--dtype"}
KERNELS = Problem("run.kernels", "c", "cannot run", "choose 'plain'")


@pytest.mark.parametrize(
    ("names", "setting", "text"),
    [
        ({}, Setting("run.kernels", "c"), "run.kernels='c'"),
        ({}, Setting("run.deterministic", True), "run.deterministic=true"),
        ({}, Setting("data.path"), "data.path"),
        ({}, Setting("data.path", Path("a b")), "data.path=a b"),
        ({}, Setting("MODEL", "a"), "MODEL='a'"),
        ({}, Setting("--top-k", 3), "--top-k 3"),
        (OPTIONS, Setting("data.tokenizer", "a b"), "--tokenizer 'a b'"),
        (OPTIONS, Setting("data.path", Path("a")), "INPUT a"),
        (OPTIONS, Setting("run.device", "cpu"), "run.device='cpu'"),
        (OPTIONS | {"--tokenizer": "tokenizer"}, Setting("data.tokenizer", "a"), "tokenizer='a'"),
        (OPTIONS | {"--tokenizer": "--model_args at="}, Setting("data.tokenizer", "a"), "--model_args at=a"),
        ({"data.tokenizer": "the model's tokenizer"}, Setting("data.tokenizer", "a"), "the model's tokenizer 'a'"),
        ({"reward.on_error": ""}, Setting("reward.on_error", "drop"), ""),
        (
            {"parallel.world_size": Setting("run.dtype", "x")} | OPTIONS,
            Setting("parallel.world_size", 2),
            "--dtype x",
        ),
    ],
)
def test_a_setting_has_the_name_that_its_caller_gives_it(names, setting, text):
    with spelled_as(names):
        assert str(setting) == text
    assert str(Setting("data.tokenizer", "a")) == "data.tokenizer='a'"


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (RuntimeError("a\nb"), "a"),
        (ValueError("\n a\nb"), "a"),
        (RuntimeError(), "RuntimeError"),
        (OSError("\n"), "OSError"),
        (ValueError("x" * 1000), "x" * 300),
    ],
)
def test_the_first_line_of_an_error_is_never_empty(error, text):
    assert first_line(error) == text


def test_no_code_takes_the_first_line_of_an_error_itself():
    own = [path.name for path in SOURCE.rglob("*.py") if "str(error).splitlines()[0]" in path.read_text()]
    assert own == []


def test_a_value_may_have_a_format():
    assert f"{Setting('train.lr', 0.5):g} {Setting('--gpu', 'h100'):s}" == "train.lr=0.5 --gpu h100"


def test_inner_names_precede_outer_names():
    with spelled_as({"data.path": "INPUT"}), spelled_as({"data.path": "--prompts"}):
        assert str(Setting("data.path", 1)) == "--prompts 1"


def test_an_error_has_the_fields_of_its_problem_and_its_callers_name_in_the_text():
    with spelled_as({"run.kernels": "--kernels"}):
        error = ConfigError(KERNELS)
    assert str(error) == "--kernels c cannot run; choose 'plain'"
    assert error.problems == (KERNELS,)
    assert str(error.with_start("here: ")) == f"here: {error}"
    assert error.with_start("here: ").problems == (KERNELS,)


def test_collected_messages_are_one_error_with_a_problem_each():
    with pytest.raises(ConfigError) as caught:
        raise_all([KERNELS, "a message", ConfigError("another")])
    assert str(caught.value).splitlines() == [
        "3 settings cannot work:",
        "  run.kernels='c' cannot run; choose 'plain'",
        "  a message",
        "  another",
    ]
    assert [problem.key for problem in caught.value.problems] == ["run.kernels", "", ""]
    copied = pickle.loads(pickle.dumps(caught.value))
    assert (str(copied), copied.problems) == (str(caught.value), caught.value.problems)
    raise_all([])


def test_another_process_keeps_the_names():
    with spelled_as(OPTIONS), ProcessPoolExecutor(1, get_context("spawn")) as pool:
        words = pool.submit(keep_names(str), Setting("data.path", 1)).result()
    assert words == "INPUT 1"


def _pairs(node: ast.Dict) -> Iterator[tuple[ast.Constant, ast.expr]]:
    for key, value in zip(node.keys, node.values, strict=True):
        if isinstance(key, ast.Constant):
            yield key, value


@cache
def _tables() -> dict[str, dict]:
    """Return the tables of names in calls of `spelled_as` by place: literals, and constants by their names."""
    tables = {}
    for path in SOURCE.rglob("*.py"):
        module = ".".join(("moefold", *path.relative_to(SOURCE).with_suffix("").parts))
        text = path.read_text()
        for call in ast.walk(ast.parse(text)) if "spelled_as(" in text else ():
            if not (isinstance(call, ast.Call) and getattr(call.func, "id", "") == "spelled_as"):
                continue
            for node in ast.walk(call):
                if isinstance(node, ast.Name) and node.id.isupper():
                    tables[f"{module}.{node.id}"] = getattr(importlib.import_module(module), node.id)
                elif isinstance(node, ast.Dict):
                    names = [(key.value, getattr(value, "value", "")) for key, value in _pairs(node)]
                    tables[f"{module}:{node.lineno}"] = dict(names)
    return tables


def test_tables_name_keys_of_a_recipe_and_options_of_commands():
    tables = _tables()
    assert len(tables) > 6
    parsers = [importlib.import_module(f"moefold.cli.{name.replace('-', '_')}") for name in COMMANDS]
    actions = [action for module in parsers if hasattr(module, "_parser") for action in module._parser()._actions]
    # lm-eval itself has --model_args.
    options = {"--model_args"} | {option for action in actions for option in action.option_strings}
    keys = {f"{section}.{key}" for section in sections() for key in key_types(section)}
    for place, table in tables.items():
        for key, name in table.items():
            assert key in options if key.startswith("--") else key in keys, (place, key)
            assert not isinstance(name, str) or not name.startswith("--") or name.partition(" ")[0] in options, place


REWRITING = {"sub", "subn", "replace", "search", "match", "fullmatch", "findall", "finditer"}
"""Functions that could read or rewrite a message."""


def _rewritten_messages(source: str) -> list[int]:
    """Return the lines that read or rewrite the text of a caught ConfigError or RunError."""
    lines = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ExceptHandler) and node.type and "Error" in (names := ast.unparse(node.type)):
            is_ours = {"ConfigError", "RunError"} & set(names.strip("()").replace(" ", "").split(","))
            for call in ast.walk(node) if is_ours else ():
                if isinstance(call, ast.Call) and getattr(call.func, "attr", "") in REWRITING:
                    used = {inner.id for inner in ast.walk(call) if isinstance(inner, ast.Name)}
                    lines += [call.lineno] if node.name in used else []
    return lines


def test_no_code_rewrites_a_message():
    texts = {path: path.read_text() for path in SOURCE.rglob("*.py")}
    catching = {path: text for path, text in texts.items() if re.search("except .*(ConfigError|RunError).* as ", text)}
    assert len(catching) > 40
    assert [path for path, text in catching.items() if _rewritten_messages(text)] == []
    caught = "try:\n    f()\nexcept ConfigError as error:\n    raise ConfigError({})"
    assert _rewritten_messages(caught.format("OPTION.sub('', str(error))")) == [4]
    assert _rewritten_messages(caught.format("str(error).replace('a', 'b')")) == [4]
    assert _rewritten_messages(caught.format("f'{error}'")) == []


@pytest.mark.parametrize("folder", ["data", "rl"])
def test_messages_of_files_and_rewards_mention_keys_as_settings(folder):
    keys = [key for table in _tables().values() for key in table if key.startswith(("data.", "reward."))]
    assert keys
    for path in (SOURCE / folder).rglob("*.py"):
        raw = [line for line in path.read_text().splitlines() if any(f"{key}=" in line for key in keys)]
        assert raw == [], f"{path}: write Setting(key, value)"
