"""Test that a failing part from outside is named by its key, its distribution or file, method and line."""

import math
import sys
from dataclasses import dataclass
from inspect import getattr_static, isfunction

import pytest

from moefold.config.base.part_registry import all_groups, built_in_kinds, find_part
from moefold.config.base.plugins import class_problems
from moefold.config.chosen import read_key, with_key
from moefold.config.groups.attention import AttentionPart
from moefold.config.groups.dispatcher import DispatcherPart
from moefold.config.groups.ffn import FeedForwardPart
from moefold.config.groups.lr_schedule import LrSchedulePart
from moefold.config.keys.paths import part_annotations
from moefold.config.keys.suggestions import part_class_problem
from moefold.config.load import config_from_dict
from moefold.config.schema import Config
from moefold.errors import ConfigError, RunError
from moefold.recipe import load_config
from moefold.validate.config import check_config
from tests.e2e.command import here, moefold
from tests.plugin.recipes import PACKAGE, PARTS, SIZES


def methods_of(group):
    """Return the methods and properties of a base class that a part may define, by name."""
    found = {name: getattr_static(group, name) for name in dir(group) if name[0] != "_" or name == "__call__"}
    return {
        name: method
        for name, method in found.items()
        if isinstance(method, property | classmethod) or isfunction(method)
    }


def call(part, name):
    getattr(part, name)()


METHODS = [(group, name) for group in all_groups() for name in methods_of(group) if name != "kind"]


def broken(group, name, result):
    """Return a part of a group, made outside of the package, with a method that returns the value of a function."""

    def method(self, *args, **kwargs):
        return result()

    asked = methods_of(group)[name]
    made = method if isfunction(asked) else type(asked)(method)
    kind = find_part(group.group, built_in_kinds(group.group)[0])
    return dataclass(frozen=True, kw_only=True)(type("Broken", (kind,), {name: made, "__module__": __name__}))()


@pytest.mark.parametrize(("group", "name"), METHODS, ids=[f"{group.group}-{name}" for group, name in METHODS])
def test_each_method_that_raises_is_named(group, name):
    part = broken(group, name, lambda: {}["nothing"])
    with pytest.raises(RunError) as failed:
        call(part, name)
    key = getattr(group, "key", group.group)
    assert str(failed.value).startswith(f"{key}='{__name__}:Broken' (a program) fails in {name}(): KeyError: 'nothing'")
    assert f"; repair {__file__}:" in str(failed.value)
    assert isinstance(failed.value.__cause__, KeyError)


def test_errors_of_a_method_are_named_in_plain_words():
    def failure(rate):
        made = type("Broken", (LrSchedulePart,), {"rate": rate, "__module__": __name__, "interface": 1})
        with pytest.raises(RunError) as failed:
            dataclass(frozen=True, kw_only=True)(made)().rate(1.0, 1, 2, 3)
        assert f"; repair {__file__}:{rate.__code__.co_firstlineno}, or choose" in str(failed.value)
        return str(failed.value)

    assert "returns nan from rate(), which must be a finite number of at least 0; " in failure(lambda *_: math.nan)
    assert "fails in rate(): TypeError: " in failure(lambda self: 1.0)
    assert "fails in rate(): SystemExit: 3; " in failure(lambda *_: sys.exit(3))


@pytest.mark.parametrize(
    ("group", "name"), [(AttentionPart, "saved"), (AttentionPart, "transient"), (FeedForwardPart, "transient")]
)
def test_results_of_another_type_are_refused(group, name):
    """The arguments of these methods have types that only a type checker imports."""
    with pytest.raises(RunError, match=rf"returns 'text' from {name}\(\), which must be "):
        call(broken(group, name, lambda: "text"), name)


def test_an_error_while_a_result_is_read_names_the_method():
    def reasons():
        yield "a reason"
        raise KeyError("nothing")

    part = broken(DispatcherPart, "unsupported_here", reasons)
    with pytest.raises(RunError, match=r"fails in unsupported_here\(\): KeyError: 'nothing'"):
        list(part.unsupported_here())


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, SystemExit])
def test_a_signal_in_a_method_does_not_blame_the_part(interrupt):
    space = {"__name__": "moefold.launch.local_job", "interrupt": interrupt}
    exec("def handle():\n    raise interrupt(143)", space)
    group = all_groups()[0]
    name = next(name for name, method in methods_of(group).items() if isfunction(method))
    with pytest.raises(interrupt):
        call(broken(group, name, space["handle"]), name)


@pytest.mark.parametrize("group", all_groups(), ids=lambda group: group.group)
def test_each_method_that_is_left_open_is_asked_for(group):
    left = [name for name, method in methods_of(group).items() if is_open(method)]
    made = dataclass(frozen=True, kw_only=True)(type("Bare", (group,), {"__module__": __name__, "interface": 1}))
    faults = "; ".join(class_problems(made, group))
    assert faults == (f"lacks the method{'s' * (len(left) > 1)} {', '.join(sorted(left))}" if left else "")


def is_open(method):
    function = getattr(method, "fget", method)
    return isfunction(function) and "NotImplementedError" in function.__code__.co_names


SLOTS = [(name, kind) for name, mark in part_annotations().items() for kind in built_in_kinds(mark.group)]


@pytest.mark.parametrize(("name", "kind"), SLOTS, ids=[f"{name}-{kind}" for name, kind in SLOTS])
def test_a_key_takes_only_the_kinds_of_its_slot(name, kind):
    """A key takes a built-in kind or refuses it by name: as a word, as a table, as an object and from outside."""
    mark = part_annotations()[name]
    part = find_part(mark.group, kind)
    is_taken = not mark.kinds or kind in mark.kinds
    from_outside = type("Outside", (part,), {"__module__": __name__})
    assert (part_class_problem(name, part) == "", part_class_problem(name, from_outside) == "") == (is_taken, is_taken)
    owner = name.rpartition(".")[0]
    around = {"model.ffn.moe.router": ["model.ffn.moe.router=softmax"]}.get(owner, [])
    path = {"path": "rows.csv"} if kind == "csv" else {}
    recipe = Config()
    if not is_taken:
        message = f"{name}={kind!r} must be {'one of ' * (len(mark.kinds) > 1)}{mark.kinds[0]!r}"
        for value in (kind, f"{{kind='{kind}'}}"):
            with pytest.raises(ConfigError, match=f"^{name}=.*(it is a kind of model|no key takes it)") as refused:
                load_config(None, [*around, f"{name}={value}"])
            assert str(refused.value).startswith(message)
        if name != "model.attention.indexer":
            with pytest.raises(ConfigError, match="must be (one of )?'"):
                check_config(with_key(recipe, name, part()))
        return
    table = {"kind": kind, **path}
    found = read_key(config_from_dict({name.partition(".")[0]: {name.partition(".")[2]: table}}), name)
    assert (type(found), found.kind) == (part, kind)


@pytest.mark.parametrize(
    ("word", "place"),
    [
        ("model.linear_attention=gated", "is_recurrent=True; it is a kind of model.attention"),
        (f"model.linear_attention={PACKAGE / 'gated_attention.py'}:Gated", "; it is a kind of model.attention"),
        (f"train.optimizer={PACKAGE / 'inverse_sqrt.py'}:InverseSqrt", "; it is a kind of train.lr_schedule"),
    ],
)
def test_a_part_from_outside_in_the_wrong_slot_is_told_its_key(word, place):
    with pytest.raises(ConfigError) as refused:
        load_config(None, [word])
    assert str(refused.value).startswith(f"{word.partition('=')[0]}='")
    assert str(refused.value).endswith(place)


@pytest.fixture
def recipe_with(tmp_path):
    """Return a function that writes a file of the package with a method that raises, and a recipe with its part."""

    def write(key, line, *overrides):
        file, _, name = PARTS[key][1].partition(":")
        before, found, after = (PACKAGE / file).read_text().partition(f"{line}\n")
        assert found
        indent = "    " * (line.startswith("    ") + 1)
        (tmp_path / file).write_text(f"{before}{line}\n{indent}1 / 0\n{after}")
        (tmp_path / "recipe.toml").write_text('format = 2\n[model]\npreset = "tiny"\n')
        number = before.count("\n") + 2
        return (
            [str(tmp_path / "recipe.toml"), *SIZES, f"{key}={file}:{name}", f"run.dir={tmp_path / 'run'}", *overrides],
            f"{key}='{file}:{name}' ({tmp_path / file}) fails in ",
            f"ZeroDivisionError: division by zero; repair {tmp_path / file}:{number}, or choose another kind of {key}",
        )

    return write


@pytest.mark.parity
@pytest.mark.parametrize(
    ("command", "key", "line", "where", "overrides"),
    [
        (
            "train",
            "train.lr_schedule",
            "    def rate(self, peak: float, first: int, step: int, steps: int) -> float:",
            "rate()",
            (),
        ),
        (
            "train",
            "train.optimizer",
            "    def step(self, closure: None = None) -> None:",
            "MomentumSgdOptimizer.step()",
            ("parallel.world_size=2", "parallel.tp=2"),
        ),
        (
            "verify",
            "parallel.dispatcher",
            "    def dispatch_communicate(self, rows: Tensor, metadata: GatheringMetadata) -> Tensor:",
            "GatheringDispatcher.dispatch_communicate()",
            ("parallel.world_size=2", "parallel.ep=2"),
        ),
    ],
    ids=["one rank", "ranks of train", "ranks of verify"],
)
def test_a_command_names_the_part_in_one_line(recipe_with, capsys, command, key, line, where, overrides):
    words, start, end = recipe_with(key, line, *overrides)
    run = here(capsys, command, *words) if command == "verify" else moefold(command, *words)
    assert run.returncode == 1
    assert "Traceback" not in run.stderr
    assert run.stderr.splitlines()[-1] == f"moefold: error: {start}{where}: {end}"
