"""Wrapped methods keep the module, add a context to each call, and can be undone."""

from contextlib import contextmanager

import torch
from torch import nn

from moefold.comm.resumable import ResumableTask
from moefold.model.module_wrapper import CallContext, wrap_calls, wrap_method


class Doubling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x):
        return 2 * x

    def forward_resumable(self, x):
        yield
        return 2 * x


def _logging(name, log, *, adds=True):
    """A wrapper that logs when its context is entered and left, and the result."""

    @contextmanager
    def running():
        log.append(f"+{name}")
        yield
        log.append(f"-{name}")

    def begin(x):
        return CallContext(running, lambda result: log.append(f"{name}={result}")) if adds else None

    return lambda function: wrap_calls(function, begin)


def test_the_wrapper_applied_last_is_the_outermost():
    module, log = Doubling(), []
    wrap_method(module, "forward", _logging("in", log))
    wrap_method(module, "forward", _logging("out", log))
    assert module(3) == 6
    assert log == ["+out", "+in", "-in", "in=6", "-out", "out=6"]


def test_a_resumable_call_leaves_its_contexts_while_it_is_suspended():
    module, log = Doubling(), []
    wrap_method(module, "forward_resumable", _logging("in", log))
    wrap_method(module, "forward_resumable", _logging("out", log))
    task = ResumableTask(module.forward_resumable(3))
    assert log == []
    task.resume()
    assert log == ["+out", "+in", "-in", "-out"]
    log.clear()
    assert task.run_to_end() == 6
    assert log == ["+out", "+in", "-in", "in=6", "-out", "out=6"]


def test_without_a_context_a_call_is_unchanged():
    module, log = Doubling(), []
    for method in ("forward", "forward_resumable"):
        wrap_method(module, method, _logging("none", log, adds=False))
    assert module(3) == ResumableTask(module.forward_resumable(3)).run_to_end() == 6
    assert log == []


def test_the_parameters_keep_their_names_and_undoing_restores_the_method():
    module, log = Doubling(), []
    undo = [wrap_method(module, "forward", _logging(name, log)) for name in ("in", "out")]
    assert list(module.state_dict()) == ["weight"]
    assert type(module) is Doubling
    undo.pop()()
    module(3)
    assert log == ["+in", "-in", "in=6"]
    undo.pop()()
    assert "forward" not in vars(module)


def test_the_method_of_a_class_is_replaced_for_all_its_objects():
    class Tripling(Doubling):
        pass

    undo = wrap_method(Tripling, "forward", lambda forward: lambda self, x: forward(self, x) + x)
    assert Tripling()(3) == 9
    assert Doubling()(3) == 6
    undo()
    assert Tripling()(3) == 6
