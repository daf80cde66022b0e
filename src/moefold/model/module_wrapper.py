"""Customise modules: set the attributes that they declare, or wrap a method, to recompute, offload or measure a part.

A wrapper takes a function and returns another of the same signature. `wrap_method` is the only code that replaces
methods. It sets an attribute of the object, so its class, its sub-modules and the names of its parameters stay, and
FSDP and autograd see the same module. If a method has several wrappers, the last applied wrapper is the outermost.

Most wrappers add contexts to a call. `wrap_calls` writes them once for plain and for resumable functions: a resumable
call leaves the contexts while it is suspended, as another micro-batch may then run.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import wraps
from inspect import isgeneratorfunction
from typing import Any

from torch import nn

from moefold.comm.resumable import Resumable, ResumableTask, run_to_end

Function = Callable[..., Any]
Wrapper = Callable[[Function], Function]


@dataclass(frozen=True)
class CallContext:
    """The context that a wrapper adds to one call of a function."""

    running: Callable[[], AbstractContextManager[Any]]
    """Context of the running function: entered at its start and after each yield, left at each yield and at its end."""
    on_end: Callable[[Any], None] | None = None
    """Called with the result of the function."""


def wrap_calls(function: Function, begin: Callable[..., CallContext | None]) -> Function:
    """Wrap a plain function or a generator function (`Resumable`), so that each call runs in a context.

    Args:
        begin: called with the arguments of each call when it starts. It returns the context, or None to add nothing.
    """

    @wraps(function)
    def run_resumable(*args: Any, **kwargs: Any) -> Resumable[Any]:
        context = begin(*args, **kwargs)
        task: ResumableTask[Any] = ResumableTask(as_resumable(function, *args, **kwargs))
        while not task.is_done:
            with nullcontext() if context is None else context.running():
                task.resume()
            if not task.is_done:
                yield
        result = task.run_to_end()
        if context is not None and context.on_end is not None:
            context.on_end(result)
        return result

    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        return run_to_end(run_resumable(*args, **kwargs))

    return run_resumable if isgeneratorfunction(function) else run


def as_resumable(function: Function, *args: Any, **kwargs: Any) -> Resumable[Any]:
    """Call a plain or resumable function as a resumable function."""
    if isgeneratorfunction(function):
        return (yield from function(*args, **kwargs))
    return function(*args, **kwargs)


def wrap_method(owner: object, name: str, wrapper: Wrapper) -> Callable[[], None]:
    """Replace a method of an object by `wrapper(method)`, and return a function that undoes it.

    Wrappers of one method are undone in the reverse order.

    Args:
        owner: the object, or a class to replace the method of all its objects.
        name: the method, or a callable attribute.
        wrapper: returns a function that takes the same arguments.
    """
    before = vars(owner).get(name)
    setattr(owner, name, wrapper(getattr(owner, name)))

    def undo() -> None:
        if before is None:
            delattr(owner, name)
        else:
            setattr(owner, name, before)

    return undo


def set_on_modules(root: nn.Module, name: str, value: object) -> None:
    """Set an attribute on `root` and all modules inside it that have it."""
    for module in root.modules():
        if hasattr(module, name):
            setattr(module, name, value)
