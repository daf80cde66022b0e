"""Errors that name the part from outside whose code fails, or whose method returns an illegal value.

`guard_methods` wraps the methods of the group's interface. Their results, such as modules and optimizers, run without
guards: `failure_of_part` finds the part when an error in their code ends a process.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from functools import cache, cached_property, wraps
from inspect import isfunction
from math import isfinite
from numbers import Integral, Real
from os.path import commonprefix
from sys import modules
from traceback import walk_tb
from types import CodeType, NoneType, SimpleNamespace, UnionType
from typing import Annotated, Any, Literal, Protocol, Self, Union, get_args, get_origin, get_type_hints

from moefold.config.base.part_registry import all_groups, describe_class, is_built_in
from moefold.config.base.plugins import origin_of
from moefold.errors import ConfigError, NoFormulaError, RunError
from moefold.terminal import printable

COMMUNICATION = ("moefold.comm.", "torch.distributed.")
"""Modules whose errors come from collectives, which may fail because of other ranks."""


def guard_methods(part: Any) -> None:
    """Wrap the methods of a class from outside that belong to its group's interface, so that errors name the class."""
    own_bases = [base for base in part.__mro__ if _is_of_package(base.__module__)]
    for name in {name for base in own_bases for name in vars(base) if name[0] != "_" or name == "__call__"}:
        owner = next(base for base in part.__mro__ if name in vars(base))
        # A part that this one inherits from was guarded when it was made.
        if _is_of_package(owner.__module__) or (owner is not part and issubclass(owner, own_bases[-1])):
            continue
        declared = next(vars(base)[name] for base in own_bases if name in vars(base))
        match vars(owner)[name]:
            case property() as method:
                guarded: Any = property(_guarded(part, name, method.fget, declared))
            case cached_property() as method:
                guarded = cached_property(_guarded(part, name, method.func, declared))
                guarded.__set_name__(part, name)
            case classmethod() | staticmethod() as method:
                guarded = type(method)(_guarded(part, name, method.__func__, declared))
            case method if isfunction(method):
                guarded = _guarded(part, name, method, declared)
            case _:
                continue
        setattr(part, name, guarded)


def _guarded(part: Any, name: str, function: Any, method: Any) -> Callable[..., Any]:
    """Return a wrapper whose errors name the part, and that checks the type of the result.

    Args:
        part: the class that defines it, or inherits it.
        function: the method in the class.
        method: the method in the base class of the group.
    """
    code = getattr(function, "__code__", None)
    hint_with = cache(lambda has_torch: _returns(method, has_torch))

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        hint = hint_with("torch" in modules)
        is_iterator = get_origin(hint) is Iterator
        try:
            value = function(*args, **kwargs)
            # A generator fails while it is read.
            value = tuple(value) if is_iterator and isinstance(value, Iterable) else value
        except (Exception, SystemExit) as error:
            if failure := _failure([_class_of(part, args)], f"{name}()", error, code):
                raise failure from error
            raise
        # The oracle refuses a part without a formula with its own message.
        if not (_fits(value, hint) or (name == "formula" and value is None)):
            plain, *bounds = get_args(hint) if get_origin(hint) is Annotated else (hint,)
            type_name = plain.__name__ if isinstance(plain, type) else re.sub(r"\b[a-z_]+\.", "", str(plain))
            rule = {float: "must be a finite number", int: "must be an integer"}.get(plain, f"must be {type_name}")
            rules = " and ".join([rule, *(mark.rule for mark in bounds)])
            text = f"returns {value!r:.60} from {name}(), which {rules.replace('and must be at', 'of at')}"
            raise RunError(f"{describe_class(_class_of(part, args))} {text}; {_way_out(part, code)}")
        return iter(value) if is_iterator else value

    return call


def _class_of(part: Any, args: tuple[Any, ...]) -> Any:
    """Return the class of the object whose method is called: the method may be of a base class of it."""
    if not args:
        return part
    owner = args[0] if isinstance(args[0], type) else type(args[0])
    return owner if issubclass(owner, part) else part


def failure_of_part(error: BaseException) -> RunError | None:
    """Return the error that names the part from outside whose code failed. None: another cause.

    The traceback is more useful for a part that a program defines.
    """
    parts = [part for group in all_groups() for part in _subclasses(group) if not _is_of_package(part.__module__)]
    for name in _modules_of(error):
        owned = [part for part in parts if origin_of(part)[1].as_dict()]
        shared = {part: len(commonprefix([part.__module__.split("."), name.split(".")])) for part in owned}
        if longest := max(shared.values(), default=0):
            return _failure([part for part, count in shared.items() if count == longest], "", error)
    return None


def _subclasses(base: Any) -> Iterator[Any]:
    for part in base.__subclasses__():
        yield part
        yield from _subclasses(part)


def _failure(parts: list[Any], method: str, error: BaseException, code: CodeType | None = None) -> RunError | None:
    """Return the error that names a failed part. None: another cause.

    Other causes are errors that moefold raised, full memory, and a lost rank in a collective.

    Args:
        parts: class of the part, or several classes of one package if any of them may have failed.
        method: the method, for the text after "fails in". Empty: the first called function of its package or file.
        code: code object of the method, for calls that do not match its signature, or None if it has no line.
    """
    part = parts[0]
    names = _modules_of(error)
    is_lost = any(name.startswith(COMMUNICATION) for name in names if name != "moefold.comm.resumable")
    is_explained = isinstance(error, ConfigError | RunError | NoFormulaError | MemoryError)
    # torch ends a recomputed function by an exception when it has all tensors. A signal may end any method.
    is_control = type(error).__module__.startswith("torch.utils.") or not isinstance(error, Exception | SystemExit)
    is_control |= isinstance(error, SystemExit) and _is_of_package(names[-1])
    if is_built_in(part) or is_explained or is_lost or is_control or "out of memory" in str(error):
        return None
    root = part.__module__.partition(".")[0]
    frames = [
        (frame.f_code, line)
        for (frame, line), name in zip(walk_tb(error.__traceback__), names, strict=True)
        if name.partition(".")[0] == root
    ]
    method = method or f"{frames[0][0].co_qualname}()"
    part_name = describe_class(part) if len(parts) == 1 else str(origin_of(part)[1])
    fault = f"{part_name} fails in {method}: {type(error).__name__}: {printable(error)}"
    return RunError(f"{fault}; {_way_out(part, *frames[-1]) if frames else _way_out(part, code)}")


def _way_out(part: Any, code: CodeType | None = None, line: int = 0) -> str:
    place = f" {code.co_filename}:{line or code.co_firstlineno}" if code else " it"
    return f"repair{place}, or choose another kind of {getattr(part, 'key', part.group)}"


def _modules_of(error: BaseException) -> list[str]:
    return [frame.f_globals.get("__name__", "") for frame, _ in walk_tb(error.__traceback__)]


def _is_of_package(module: str) -> bool:
    return module.startswith("moefold.")


def _returns(method: Any, has_torch: bool) -> Any:
    """Return the annotated result type of a method or property of a base class, or Any if it cannot be read."""
    function = getattr(method, "fget", None) or getattr(method, "func", None) or getattr(method, "__func__", method)
    names = {"Tensor": modules["torch"].Tensor} if has_torch else {}
    try:
        # Types of the arguments may be names that only a type checker imports.
        result = SimpleNamespace(__annotations__={"return": function.__annotations__["return"]})
        hint = get_type_hints(result, function.__globals__, names, include_extras=True)["return"]
    except (AttributeError, NameError, TypeError, KeyError):
        return Any
    return Any if hint is Self else hint


def _fits(value: Any, hint: Any) -> bool:
    """Return whether a value has a type. Numbers must be finite."""
    origin = get_origin(hint)
    entries: Any = get_args(hint)
    if origin is Annotated:
        return _fits(value, entries[0]) and all(mark.is_legal(value) for mark in entries[1:])
    if origin in (Union, UnionType):
        return any(_fits(value, entry) for entry in entries)
    if origin is Literal:
        return value in entries
    if hint in (float, int):
        numbers: Any = Real if hint is float else Integral
        return isinstance(value, numbers) and type(value) is not bool and isfinite(value)
    if origin is Iterator:
        return isinstance(value, tuple) and all(_fits(entry, entries[0]) for entry in value)
    kind: Any = NoneType if hint is None else origin or hint
    if not isinstance(kind, type) or kind is Any or Protocol in kind.__bases__:
        return True
    return isinstance(value, kind) and (kind is not tuple or not entries or _all_fit(value, entries))


def _all_fit(values: Any, entries: Any) -> bool:
    hints = entries[:1] * len(values) if entries[-1] is ... else entries
    return len(values) == len(hints) and all(map(_fits, values, hints))
