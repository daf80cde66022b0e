"""A part from outside that fails is named by its key, its distribution or file, the method and the line."""

from dataclasses import dataclass
from inspect import getattr_static, isfunction

import pytest

from moefold.config.find import all_groups, built_in_kinds, find_part
from moefold.config.outside import class_faults
from moefold.errors import RunError

FOUR_HEADS = "model.attention.num_heads=4"


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
    """Return a part of a group, made outside of the package, in which a method returns the value of a function."""

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


@pytest.mark.parametrize("group", all_groups(), ids=lambda group: group.group)
def test_each_method_that_is_left_open_is_asked_for(group):
    left = [name for name, method in methods_of(group).items() if is_open(method)]
    made = dataclass(frozen=True, kw_only=True)(type("Bare", (group,), {"__module__": __name__, "interface": 1}))
    faults = "; ".join(class_faults(made, group))
    assert faults == (f"lacks the method{'s' * (len(left) > 1)} {', '.join(sorted(left))}" if left else "")


def is_open(method):
    function = getattr(method, "fget", method)
    return isfunction(function) and "NotImplementedError" in function.__code__.co_names
