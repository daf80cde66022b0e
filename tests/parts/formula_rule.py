"""Rule for the formula of a part: it is written from papers, and reaches no code that trains.

`formula_reads` walks the syntax trees of a formula and of every function and class that it uses, in its own file, in an
`oracle.py`, or a type of `config/groups/`. All that they may use is allowed by name, all else is refused. The part
itself may be read field by field, and may be handed to a function, whose parameter is then the part.
"""

import ast
import builtins
import inspect
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cache
from importlib import import_module
from importlib.util import resolve_name
from inspect import getattr_static, getsourcefile
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any, NamedTuple, get_args, get_type_hints

import torch

from moefold.config.base.field import VerifyAs
from moefold.config.base.param_spec import ParamSpec
from moefold.config.base.part import Part, Table

BUILTINS = frozenset(
    {"abs", "all", "any", "bool", "dict", "divmod", "enumerate", "float", "frozenset", "int", "isinstance", "len"}
    | {"list", "map", "max", "min", "pow", "range", "reversed", "round", "set", "slice", "sorted", "str", "sum"}
    | {"tuple", "zip", "AssertionError", "ValueError"}
)
"""Built-in names; not `getattr`, `vars`, `globals`, `type`, `eval` and others that reach anything by its name."""
LIBRARIES: Mapping[str, frozenset[str] | None] = {
    "math": None,
    "typing": None,
    "collections.abc": None,
    "dataclasses": frozenset({"dataclass", "field"}),
    "functools": frozenset({"partial"}),
}
"""Names of libraries that a formula may use; None: all. torch is in `_is_torch_maths`."""
TORCH_MODULES = frozenset({"torch", "torch.functional", "torch.nn.functional", "torch.linalg", "torch.special"})
"""Modules of torch with functions of tensors. Others load, compile or register code."""
TYPES = "moefold.config.groups."
"""Modules whose classes a formula may take, its arguments and results, but no function: parts compute with these."""
ORACLES = "moefold.parts."
"""Start of the modules `oracle`, which nothing but formulas imports (`test_formulas.py`): one formula may use the
functions of another one, as convolutions and gates are the same in several kinds of attention."""
INTROSPECTION = frozenset({"args", "func", "keywords", "gi_frame", "cr_frame", "ag_frame", "tb_frame"})
"""Attributes by which a closure, a `partial` or a generator gives back the objects that it was made with."""
OF_PARAM_SPEC = frozenset({"name", "shape", "part", "matrix_rows", "never_as_matrix", "is_matrix"})
"""Attributes of a `ParamSpec` that a formula may read. Its others compute for the trainer, as `shard` and `numel`."""
OF_CONTAINERS = frozenset({"append", "extend", "get", "items", "keys", "setdefault", "values"})
"""Methods of lists and dicts."""
OF_ARGUMENTS = frozenset(
    {"advantage", "biased", "columns", "experts", "exponent", "first", "is_token", "is_training", "log_probs"}
    | {"logits", "loss", "norm", "number", "of_rollout", "old", "pair", "position", "positions", "rate", "rotate"}
    | {"score_factor", "scores", "second", "seconds", "seed_of", "specs", "tokens_per_expert", "top_k", "weights", "x"}
)
"""Attributes of the other values that the oracle hands to formulas, and of results of torch."""
OF_VALUES = (frozenset(dir(torch.Tensor)) - frozenset(dir(ParamSpec))) | OF_PARAM_SPEC | OF_CONTAINERS | OF_ARGUMENTS
"""Attributes of a value that a formula gets or computes, whose class the walk does not know."""


class FormulaError(AssertionError):
    """Formula that uses a forbidden name."""


class ThePart(NamedTuple):
    """Value of a name or an expression: the part, or a part or table in a field of it."""

    classes: tuple[type, ...]
    """The class of the part, or the classes that the annotation of the field names."""
    path: str
    """Fields from the part to it, as "router.softmax". Empty: the part itself."""


class Imported(NamedTuple):
    """Value of a name that an import statement binds."""

    name: str
    """With its module, dotted."""


OPAQUE = None
"""Value of a name that a formula computes, or gets from the oracle."""
Scope = Mapping[str, ThePart | Imported | None]


def formula_reads(part: type[Part]) -> set[str]:
    """Check the formula of a part and return the fields that it reads, of a part in a field as "router.bias".

    Raises:
        FormulaError: it uses something that it may not.
    """
    rule = _Rule(part)
    rule.check()
    return rule.reads


@dataclass(frozen=True)
class _Place:
    """Where a node stands: the file, and the values of the names around it."""

    module: ModuleType
    scope: Scope
    owner: type
    """Class whose formula is checked: the file of this class may be used, and `super()` goes on behind it."""

    def inside(self, names: Scope) -> "_Place":
        return replace(self, scope={**self.scope, **names})


class _Rule:
    """Walk over the formula of one part."""

    def __init__(self, part: type[Part]) -> None:
        self.part = part
        self.reads: set[str] = set()
        self._seen: set[tuple[str, str, int, str]] = set()
        self._used: set[tuple[str, str]] = set()
        """Modules and names of the functions and classes that the formula uses."""
        self._own: set[str] = set()
        """Names that these classes bind, which the walk checks; none is an attribute of a `ParamSpec`."""
        self._attributes: list[tuple[str, ast.AST, _Place]] = []
        """Attributes of values whose class is unknown."""

    def check(self) -> None:
        """Check the formula of the part, and that nothing but its recipe sets its fields."""
        for cls in self.part.__mro__[: self.part.__mro__.index(Part)]:
            for name in ("__init__", "__new__", "__post_init__"):
                code = getattr(inspect.unwrap(vars(cls).get(name, self.check)), "__code__", None)
                # The __init__ of a dataclass is compiled of a string.
                if name in vars(cls) and getattr(code, "co_filename", "") != "<string>":
                    raise FormulaError(f"{cls.__qualname__}.{name} may set the fields that its formula reads")
        self.check_formula_of(next(base for base in self.part.__mro__ if "formula" in vars(base)))
        for name, node, place in self._attributes:
            if name not in OF_VALUES | self._own:
                self._refuse(node, place, f"reads .{name}, not an attribute of a tensor or of what a formula gets")

    def check_formula_of(self, owner: type) -> None:
        """Check the formula that a class defines; `self` is the part."""
        module = sys.modules[owner.__module__]
        # The formula of a class from outside is wrapped, so that its failures are named.
        formula = inspect.unwrap(vars(owner)["formula"])
        body = next((node for node in _definitions(module, owner.__name__) if isinstance(node, ast.ClassDef)), None)
        found = [node for node in body.body if _binds(node, "formula")] if body else []
        if len(found) != 1 or not isinstance(found[0], ast.FunctionDef) or not _is_of(formula, found[0], module):
            raise FormulaError(f"{owner.__qualname__}.formula is not one `def formula` in its class")
        place = _Place(module, {}, owner)
        self._function(found[0], place, {found[0].args.args[0].arg: ThePart((self.part,), "")})
        own = {name for file, name in self._used if file == module.__name__}
        if shared := _used_by_code(module, own) & own:
            raise FormulaError(f"{owner.__qualname__}.formula shares {', '.join(sorted(shared))}() with what it judges")

    # Names

    def _name(self, node: ast.Name, place: _Place) -> None:
        """Check a name that is read, and the object that it means."""
        if node.id in place.scope:
            value = place.scope[node.id]
            if isinstance(value, ThePart):
                self._refuse(node, place, f"hands on {node.id}, the part: a formula reads fields of it")
            if isinstance(value, Imported):
                self._import(value.name, node, place)
            return
        self._global(place.module, node.id, node, place)

    def _global(self, module: ModuleType, name: str, node: ast.AST, place: _Place, values: Scope | None = None) -> None:
        """Check a name of a module: the statement that binds it there, or else a built-in name."""
        found = list(_definitions(module, name))
        if not found:
            if name in BUILTINS and hasattr(builtins, name):
                return
            self._refuse(node, place, f"uses {name}, which is none of the names that a formula may use")
        inner = _Place(module, {}, place.owner)
        for definition in found:
            key = (module.__name__, name, definition.lineno, repr(values))
            if key in self._seen:
                continue
            self._seen.add(key)
            self._definition(definition, name, inner, values or {})

    def _definition(self, node: ast.stmt, name: str, place: _Place, values: Scope) -> None:
        """Check a statement of a module that binds a name."""
        live = getattr(place.module, name, None)
        match node:
            case ast.FunctionDef():
                if place.module.__name__.startswith(TYPES):
                    self._refuse(node, place, f"uses {name}(), which parts compute with: write it a second time")
                if not _is_of(live, node, place.module):
                    self._refuse(node, place, f"uses {name}, which something else than its `def` binds")
                self._used.add((place.module.__name__, name))
                self._function(node, place, values)
            case ast.ClassDef():
                if not isinstance(live, type) or issubclass(live, Part | Table | torch.nn.Module):
                    self._refuse(node, place, f"uses the class {name}, which computes or builds")
                self._used.add((place.module.__name__, name))
                self._class(node, live, place)
            case ast.Assign(value=ast.Lambda() as value) if _is_of(live, value, place.module):
                self._function(value, place, values)
            case ast.Assign(value=value) | ast.AnnAssign(value=ast.expr() as value) if _is_constant(live):
                self._visit(value, place)
            case ast.Import() | ast.ImportFrom():
                self._import(_imports(node, place.module)[name], node, place, values)
            case _:
                self._refuse(node, place, f"uses {name}, which is not a constant, function or class")

    def _import(self, dotted: str, node: ast.AST, place: _Place, values: Scope | None = None) -> None:
        """Check the name of an import, or an attribute of it."""
        module, attribute = _split(dotted)
        library = module.__name__
        name, _, rest = attribute.partition(".")
        if library.partition(".")[0] == "torch":
            if not _is_torch_maths(module, attribute):
                self._refuse(node, place, f"uses {dotted}: of torch, functions of tensors and data types")
        elif library in LIBRARIES:
            known = LIBRARIES[library] or {name}
            if rest or name not in known or isinstance(getattr(module, name, module), ModuleType):
                self._refuse(node, place, f"uses {dotted}")
        elif not name or not _may_use(module, place.owner):
            self._refuse(node, place, f"uses {dotted}: a formula may use its own file, oracle.py and torch")
        else:
            self._global(module, name, node, place, values)

    # The part

    def _value(self, node: ast.expr, place: _Place) -> ThePart | None:
        """Return the part that an expression is, or that is in a field; None: another value. Count the read fields."""
        if isinstance(node, ast.Name):
            value = place.scope.get(node.id)
            return value if isinstance(value, ThePart) else None
        if not isinstance(node, ast.Attribute) or (of := self._value(node.value, place)) is None:
            return None
        path = f"{of.path}.{node.attr}".lstrip(".")
        owners = [cls for cls in of.classes if _is_field_of(cls, node.attr)]
        if not owners:
            self._refuse(node, place, f"reads {ast.unparse(node)}, which is not a field of the part")
        self.reads.add(path)
        arms = {arm for cls in owners for arm in _arms(cls, node.attr)}
        if not all(_is_plain(arm) or _is_inner(arm) for arm in arms):
            self._refuse(node, place, f"reads {ast.unparse(node)}, a field whose type is neither plain nor a part")
        inner = tuple(arm for arm in arms if _is_inner(arm))
        return ThePart(inner, path) if inner else None

    def _is_field(self, node: ast.expr, place: _Place) -> bool:
        return isinstance(node, ast.Attribute) and self._value(node.value, place) is not None

    def _call(self, node: ast.Call, place: _Place) -> None:
        """Check a call: of the formula of a part in a field, of the next formula, or of a function given the part."""
        match node.func:
            case ast.Attribute(value=ast.Call(func=ast.Name("super"), args=[], keywords=[]), attr="formula"):
                self._next_formula(place, node)
                return
            case ast.Attribute(value=value, attr="formula") if not node.args and not node.keywords:
                of = self._value(value, place)
                if of is not None and of.path and all(issubclass(cls, Part) for cls in of.classes):
                    return
        if self._is_field(node.func, place):
            self._refuse(node, place, f"calls {ast.unparse(node.func)}")
        function, arguments = node.func, node.args
        if _imported(function, place) == "functools.partial" and arguments:
            self._visit(function, place)
            function, *arguments = arguments
        values = {i: value for i, one in enumerate(arguments) if (value := self._value(one, place))}
        named = {one.arg: value for one in node.keywords if (value := self._value(one.value, place))}
        if values or named:
            self._helper(function, values, named, place)
        else:
            self._visit(function, place)
        given = [one for i, one in enumerate(arguments) if i not in values]
        self._visit_all([*given, *(one.value for one in node.keywords if one.arg not in named)], place)

    def _helper(
        self, node: ast.expr, values: Mapping[int, ThePart], named: Mapping[str | None, ThePart], place: _Place
    ) -> None:
        """Check a function with the part as an argument."""
        name = node.id if isinstance(node, ast.Name) else ""
        imported = place.scope.get(name)
        module, wanted = place.module, name
        if isinstance(imported, Imported):
            module, wanted = _split(imported.name)
        while isinstance(found := next(_definitions(module, wanted), None), ast.Import | ast.ImportFrom):
            module, wanted = _split(_imports(found, module)[wanted])
        if not isinstance(found, ast.FunctionDef) or (name in place.scope and imported is OPAQUE):
            self._refuse(node, place, f"hands the part to {ast.unparse(node)}, which is not a function of a file")
        if module is not place.module and not _may_use(module, place.owner):
            self._refuse(node, place, f"hands the part to {module.__name__}.{wanted}")
        order = [one.arg for one in (*found.args.posonlyargs, *found.args.args)]
        given = {**{order[i] if i < len(order) else None: value for i, value in values.items()}, **named}
        parameters = {key: value for key, value in given.items() if key is not None}
        if parameters.keys() - {*order, *(one.arg for one in found.args.kwonlyargs)} or None in given:
            self._refuse(node, place, f"hands the part to {name}, which has no parameter for it")
        self._global(module, wanted, node, place, parameters)

    def _next_formula(self, place: _Place, node: ast.AST) -> None:
        """Check the formula that `super().formula()` calls."""
        rest = self.part.__mro__[self.part.__mro__.index(place.owner) + 1 :]
        base = next((base for base in rest if "formula" in vars(base)), None)
        if base is None:
            self._refuse(node, place, "calls super().formula(), and no base class has one")
        self.check_formula_of(base)

    # Statements and expressions

    def _function(self, node: ast.FunctionDef | ast.Lambda, place: _Place, values: Scope) -> None:
        """Check a function, without annotations; `values` are of parameters that are not opaque."""
        arguments = node.args
        self._visit_all([*arguments.defaults, *(one for one in arguments.kw_defaults if one)], place)
        parameters = {one.arg: OPAQUE for one in ast.walk(arguments) if isinstance(one, ast.arg)}
        self._visit_all([] if isinstance(node, ast.Lambda) else node.decorator_list, place)
        body = [node.body] if isinstance(node, ast.Lambda) else node.body
        bound = _bound(body, place.module)
        self._no_shadow({**parameters, **bound}, node, place)
        self._no_shadow(bound, node, place.inside(values))
        self._visit_all(body, place.inside({**parameters, **values, **bound}))

    def _no_shadow(self, names: Iterable[str], node: ast.AST, place: _Place) -> None:
        """Refuse names that would hide the part, whose name the walk follows."""
        if taken := [name for name in names if isinstance(place.scope.get(name), ThePart)]:
            self._refuse(node, place, f"binds {', '.join(taken)} again, which is the part")

    def _class(self, node: ast.ClassDef, live: type, place: _Place) -> None:
        """Check a class of a module: its bases, the names that its body binds, and its methods."""
        for name, value in vars(live).items():
            function = value.fget if isinstance(value, property) else value
            defs = [one for one in node.body if isinstance(one, ast.FunctionDef) and one.name == name]
            is_field = name in getattr(live, "_fields", ())
            is_written = is_field or _is_constant(value) or any(_is_of(function, one, place.module) for one in defs)
            if not (name.startswith("_") or is_written):
                self._refuse(node, place, f"uses {live.__qualname__}.{name}, which is not a constant, field or method")
        self._own |= {*vars(live), *getattr(live, "__annotations__", ())} - frozenset(dir(ParamSpec))
        self._visit_all([*node.bases, *(one.value for one in node.keywords), *node.decorator_list, *node.body], place)

    def _visit_all(self, nodes: Iterable[ast.AST], place: _Place) -> None:
        for node in nodes:
            self._visit(node, place)

    def _visit(self, node: ast.AST, place: _Place) -> None:
        """Check a statement or expression whose value is used."""
        if isinstance(node, ast.expr) and (value := self._value(node, place)):
            self._refuse(
                node, place, f"hands on {ast.unparse(node)}, {'a part in a field' if value.path else 'the part'}"
            )
        match node:
            case ast.FunctionDef() | ast.Lambda():
                self._function(node, place, {})
            case ast.ClassDef() | ast.AsyncFunctionDef() | ast.Global() | ast.Await():
                self._refuse(node, place, "has a class, a coroutine or a global statement of its own")
            case ast.Import() | ast.ImportFrom():
                pass
            case ast.Name(ctx=ast.Load()):
                self._name(node, place)
            case ast.Attribute():
                self._attribute(node, place)
            case ast.Call():
                self._call(node, place)
            case ast.If(test=test) | ast.IfExp(test=test) | ast.While(test=test) | ast.Assert(test=test):
                self._test(test, place)
                self._visit_all((one for one in ast.iter_child_nodes(node) if one is not test), place)
            case ast.UnaryOp(op=ast.Not()) | ast.Compare():
                self._test(node, place)
            case ast.AnnAssign():
                self._visit_all([node.target, *([node.value] if node.value else [])], place)
            case ast.ListComp() | ast.SetComp() | ast.DictComp() | ast.GeneratorExp():
                targets = {one.id for part in node.generators for one in _names(part.target)}
                self._no_shadow(targets, node, place)
                # The first iterable is computed outside, where a target of the same name has another value.
                self._visit(node.generators[0].iter, place)
                inside = place.inside(dict.fromkeys(targets, OPAQUE))
                self._visit_all((one for one in ast.iter_child_nodes(node) if one is not node.generators[0]), inside)
                self._visit_all(node.generators[0].ifs, inside)
            case ast.MatchClass():
                for name in node.kwd_attrs:
                    self._attribute_name(name, node, place)
                    self._attributes.append((name, node, place))
                self._visit_all(ast.iter_child_nodes(node), place)
            case _:
                self._visit_all(ast.iter_child_nodes(node), place)

    def _attribute(self, node: ast.Attribute, place: _Place) -> None:
        """Check an attribute of a value, or a name in an imported module."""
        if self._is_field(node, place):
            return
        self._attribute_name(node.attr, node, place)
        root, path = node.value, node.attr
        while isinstance(root, ast.Attribute):
            root, path = root.value, f"{root.attr}.{path}"
        imported = _imported(root, place)
        if imported is not None:
            self._import(f"{imported}.{path}", node, place)
        else:
            self._attributes.append((node.attr, node, place))
            self._visit(node.value, place)

    def _attribute_name(self, name: str, node: ast.AST, place: _Place) -> None:
        if (name.startswith("_") and name != "_replace") or name in INTROSPECTION:
            self._refuse(node, place, f"reads .{name}")

    def _test(self, node: ast.expr, place: _Place) -> None:
        """Check a condition, which may ask whether a part in a field is there."""
        match node:
            case ast.BoolOp():
                for value in node.values:
                    self._test(value, place)
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                self._test(operand, place)
            case ast.Compare(left=left, ops=[ast.Is() | ast.IsNot()], comparators=[ast.Constant(None)]):
                self._test(left, place)
            case ast.Compare():
                self._visit_all([node.left, *node.comparators], place)
            case _:
                if not self._value(node, place):
                    self._visit(node, place)

    def _refuse(self, node: ast.AST, place: _Place, reason: str) -> Any:
        line = getattr(node, "lineno", 0)
        raise FormulaError(f"formula of {self.part.__qualname__}, {place.module.__name__} line {line}: {reason}")


def _is_torch_maths(module: ModuleType, attribute: str) -> bool:
    """Return whether a name of torch is a function of tensors, or a type of data."""
    name, _, rest = attribute.partition(".")
    found = getattr(module, name, None)
    if module.__name__ not in TORCH_MODULES or rest and found is not torch.Tensor:
        return False
    is_type = isinstance(found, torch.dtype) or found is torch.Tensor
    return is_type or isinstance(found, BuiltinFunctionType) or getattr(found, "__module__", "") in TORCH_MODULES


def _may_use(module: ModuleType, owner: type) -> bool:
    """Return whether a formula may use a module of the package, or of the package of its part."""
    name = module.__name__
    own = owner.__module__
    beside = f"{own.rpartition('.')[0]}.oracle" if "." in own else ""
    is_oracle = name.startswith(ORACLES) and name.endswith(".oracle")
    return name in {own, beside} or is_oracle or name.startswith(TYPES)


def _imported(root: ast.expr, place: _Place) -> str | None:
    """Return the dotted name of an imported name; None: another statement binds it."""
    if not isinstance(root, ast.Name):
        return None
    if root.id in place.scope:
        value = place.scope[root.id]
        return value.name if isinstance(value, Imported) else None
    found = list(_definitions(place.module, root.id))
    is_import = len(found) == 1 and isinstance(found[0], ast.Import | ast.ImportFrom)
    return _imports(found[0], place.module)[root.id] if is_import else None


def _is_field_of(cls: type, name: str) -> bool:
    """Return whether an attribute is the value of a field. No property or method takes its place."""
    static = getattr_static(cls, name, None)
    is_value = not hasattr(type(static), "__get__") and cls.__getattribute__ is object.__getattribute__
    return is_value and name in {entry.name for entry in fields(cls)}


def _arms(cls: Any, name: str) -> Iterator[Any]:
    """Yield the types of a field, without None and annotations."""
    yield from (arm for arm in _flat(get_type_hints(cls)[name]) if arm is not type(None))


def _flat(hint: Any) -> Iterator[Any]:
    """Yield the types of a union, and of the items of a tuple."""
    inner = [one for one in get_args(hint) if one is not Ellipsis]
    if not inner:
        yield hint
    for one in inner:
        yield from _flat(one)


def _is_plain(arm: Any) -> bool:
    """Return whether a type, or the word of a `Literal`, is a plain value of a recipe."""
    return arm in (int, float, str, bool) or isinstance(arm, int | float | str)


def _is_inner(arm: Any) -> bool:
    return isinstance(arm, type) and issubclass(arm, Part | Table) and is_dataclass(arm)


def _is_constant(value: Any) -> bool:
    if isinstance(value, tuple | frozenset):
        return all(map(_is_constant, value))
    return isinstance(value, int | float | str | torch.dtype)


def _is_of(live: Any, node: ast.FunctionDef | ast.Lambda, module: ModuleType) -> bool:
    """Return whether a function is compiled from this definition of this file."""
    if not isinstance(live, FunctionType):
        return False
    decorators = [] if isinstance(node, ast.Lambda) else node.decorator_list
    first = min(one.lineno for one in (node, *decorators))
    code = live.__code__
    return code.co_firstlineno == first and Path(code.co_filename).resolve() == _file(module).resolve()


# Files and names


def _file(module: ModuleType) -> Path:
    found = getsourcefile(module)
    assert found is not None
    return Path(found)


@cache
def _tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


def _definitions(module: ModuleType, name: str) -> Iterator[ast.stmt]:
    """Yield the statements of a module that bind a name, also those within `if` and `try`."""
    yield from (node for node in _statements(_tree(_file(module)).body) if _binds(node, name))


def _statements(nodes: Iterable[ast.AST]) -> Iterator[ast.stmt]:
    for node in nodes:
        if isinstance(node, ast.stmt):
            yield node
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield from _statements(ast.iter_child_nodes(node))


def _binds(node: ast.stmt, name: str) -> bool:
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            return node.name == name
        case ast.Import() | ast.ImportFrom():
            return name in {(one.asname or one.name).partition(".")[0] for one in node.names}
        case _:
            inner = [one for one in ast.iter_child_nodes(node) if isinstance(one, ast.expr | ast.withitem)]
            return any(found.id == name for one in inner for found in _names(one))


def _names(node: ast.AST) -> Iterator[ast.Name]:
    """Yield the names that an expression or target binds."""
    yield from (one for one in ast.walk(node) if isinstance(one, ast.Name) and not isinstance(one.ctx, ast.Load))


def _imports(node: ast.Import | ast.ImportFrom, module: ModuleType) -> dict[str, str]:
    """Return the meaning of each name of an import statement."""
    if isinstance(node, ast.Import):
        return {
            one.asname or one.name.partition(".")[0]: one.name if one.asname else one.name.partition(".")[0]
            for one in node.names
        }
    relative = "." * node.level + (node.module or "")
    source = resolve_name(relative, module.__package__ or "") if node.level else relative
    return {one.asname or one.name: f"{source}.{one.name}" for one in node.names}


def _bound(body: Iterable[ast.AST], module: ModuleType) -> dict[str, Imported | None]:
    """Return the names that a function binds, without functions and comprehensions within it.

    A name that an import binds counts as imported, whatever else binds it.
    """
    found: dict[str, Imported | None] = {}

    def bind(name: str, value: Imported | None) -> None:
        known = found.setdefault(name, value)
        if known and value and known != value:
            raise FormulaError(f"{module.__name__}: two imports bind {name}")
        found[name] = known or value

    def walk(node: ast.AST) -> None:
        match node:
            case ast.Import() | ast.ImportFrom():
                for name, source in _imports(node, module).items():
                    bind(name, Imported(source))
            case ast.FunctionDef() | ast.ClassDef() | ast.AsyncFunctionDef():
                bind(node.name, OPAQUE)
                return
            case ast.Lambda():
                return
            case ast.comprehension():
                for one in (node.iter, *node.ifs):
                    walk(one)
                return
            case ast.Name(ctx=ast.Store() | ast.Del()):
                bind(node.id, OPAQUE)
            case ast.MatchAs() | ast.MatchStar() | ast.ExceptHandler() if node.name:
                bind(node.name, OPAQUE)
        for child in ast.iter_child_nodes(node):
            walk(child)

    for node in body:
        walk(node)
    return found


@cache
def _split(dotted: str) -> tuple[ModuleType, str]:
    """Split a dotted name into its module and the names in it."""
    words = dotted.split(".")
    for end in range(len(words), 0, -1):
        with suppress(ModuleNotFoundError, AttributeError):
            return import_module(".".join(words[:end])), ".".join(words[end:])
    raise FormulaError(f"{dotted} is not importable")


def _used_by_code(module: ModuleType, of_formula: set[str]) -> set[str]:
    """Return the functions of a file that its classes and the files beside it use, but not in formulas.

    Args:
        module: the file.
        of_formula: its functions and classes that a formula uses.
    """
    body = _tree(_file(module)).body
    functions = {node.name: node for node in body if isinstance(node, ast.FunctionDef)}
    classes = [node for node in body if isinstance(node, ast.ClassDef) and node.name not in of_formula]
    waiting: list[ast.AST] = [node for one in classes for node in one.body if not _binds(node, "formula")]
    files = (file for file in _file(module).parent.glob("*.py") if file.name not in ("oracle.py", _file(module).name))
    waiting += (node for file in files for node in ast.walk(_tree(file)) if _is_import_of(node, module))
    used: set[str] = set()
    while waiting:
        nodes = list(ast.walk(waiting.pop()))
        names = {one.id for one in nodes if isinstance(one, ast.Name)}
        names |= {one.name for one in nodes if isinstance(one, ast.alias)}
        used |= (new := names & functions.keys() - used)
        waiting += [functions[name] for name in new]
    return used


def _is_import_of(node: ast.AST, module: ModuleType) -> bool:
    return (
        isinstance(node, ast.ImportFrom) and f"{node.module}".rpartition(".")[2] == module.__name__.rpartition(".")[2]
    )


def assert_formula(part, unread: Iterable[str] = ()) -> set[str]:
    """Check that a formula uses no code that trains, and reads each field of its part. Return the read fields.

    The oracle itself reads the common fields of all kinds of a group: the framed fields, and fields of a layer's place.
    """
    read = formula_reads(part)
    names = {field.name for field in fields(part)} - part.framed - part.of_layers - set(unread)
    hints = get_type_hints(part, include_extras=True)
    formats = {name for name in names if any(isinstance(m, VerifyAs) for m in getattr(hints[name], "__metadata__", ()))}
    assert names - formats <= read
    return read
