"""The rule for formulas refuses all names that reach the judged code, and all that it cannot follow."""

import ast
import re
import sys
from importlib import import_module
from pathlib import Path

import pytest

import moefold.parts
from moefold.config.base.part_registry import find_part
from moefold.config.base.plugins import import_file
from tests.parts.formula_rule import FormulaError, formula_reads

HEAD = """
import functools
import math
import sys
import typing
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, NamedTuple
import numpy as np
import torch
from moefold.config.groups.block import ActivationPart, NormPart
from moefold.config.groups.lr_schedule import interpolate
from moefold.config.base.part import KindOf, part_field
from moefold.model.norm import RMSNorm
import moefold.model.norm as norms
from moefold.parts.attention.gqa.oracle import gates
FACTOR = 2.0
TABLE = {"norm": RMSNorm}
"""
PART = """
@dataclass(frozen=True, kw_only=True)
class Mine(NormPart):
    interface: ClassVar[int] = 1
    scale: float = 1.0
    inner: ActivationPart | None = None
    anything: Any = RMSNorm
    def build(self, width):
        return shared(RMSNorm(width, self.eps))
    @property
    def double(self):
        return 2 * self.scale
    def formula(self):
        {body}
def shared(x):
    return x
class Pair(NamedTuple):
    first: float
    second: float = 0.0
"""


def load(tmp_path: Path, body: str, before: str = "", after: str = "") -> type:
    """Return the class of a file of a user whose formula has a body."""
    file = tmp_path / f"mine{len(list(tmp_path.iterdir()))}.py"
    lines = body.strip("\n").replace("\n", "\n        ")
    file.write_text(HEAD + before + PART.replace("{body}", lines) + after)
    return getattr(sys.modules[_module(file)], "Mine")  # noqa: B009


def refusal(reason: str) -> str:
    """Return the pattern of a refusal by this reason, and no other one."""
    return rf"(^|line \d+: ){re.escape(reason)}(\W|$)"


def _module(file: Path) -> str:
    _, origin = import_file(f"{file}:Mine")
    return next(name for name, module in sys.modules.items() if getattr(module, "__file__", None) == origin.file)


CLEAN = {
    "fields": "return lambda x, w, b: w * x / (x.square().mean(-1) + self.eps).sqrt() * self.scale",
    "torch": "import torch.nn.functional as F\nreturn lambda x, w, b: F.softplus(torch.exp(x)) * torch.Tensor.abs(x)",
    "a part in a field": "return self.inner.formula() if self.inner else lambda x, w, b: x",
    "a question": "if self.inner is None or not self.inner:\n    return None\nreturn 1 if not self.inner else 2",
    "a helper": "def f(x, w, b):\n    return helper(x, FACTOR)\nreturn f",
    "a helper with the part": "return partial(of_part, self, given=2)",
    "the part by keyword": "return of_part(given=2, part=self)",
    "a type": "pair = Pair(1.0)\nreturn [x._replace(second=self.scale).second for x in (pair,)]",
    "a loop": "total = 0.0\nfor i in range(3):\n    total += i * self.scale\nreturn total",
}
HELPERS = """
def helper(x, factor):
    return factor * math.exp(x)
def of_part(part, given):
    return inner_of(part) * given
def inner_of(it):
    return it.scale + it.eps
"""


@pytest.mark.parametrize("name", CLEAN)
def test_a_formula_of_its_own_passes(tmp_path, name):
    formula_reads(load(tmp_path, CLEAN[name], after=HELPERS))


def test_the_fields_that_are_read_are_returned(tmp_path):
    assert formula_reads(load(tmp_path, "return partial(of_part, self)", after=HELPERS)) == {"scale", "eps"}
    assert formula_reads(load(tmp_path, "return 0 if self.inner else self.scale")) == {"scale", "inner"}


BAD: dict[str, tuple[str, str]] = {
    "the module of the part": ("m = RMSNorm(3, self.eps)\nreturn m", "uses moefold.model.norm.RMSNorm"),
    "a helper that builds": ("return helper(self)", "calls p.build"),
    "getattr": ('return getattr(self, "build")(4)', "hands the part to getattr"),
    "an alias": ("me = self\nreturn lambda x, w, b: me.build(3)(x)", "hands on self"),
    "a method": ("return self.build(3)", "calls self.build"),
    "a property": ("return self.double", "reads self.double"),
    "itself": ("return self.formula()", "calls self.formula"),
    "its class": ("return Mine(scale=2.0).build(3)", "uses the class Mine"),
    "its type": ("return self.__class__.build(self, 3)", "reads self.__class__"),
    "a name of its own": ("return type(self).build(self, 3)", "hands the part to type(self).build"),
    "vars": ("return vars(self)", "hands the part to vars"),
    "globals": ('return globals()["RMSNorm"]', "uses globals"),
    "eval": ('return eval("self.build(3)")', "uses eval"),
    "an import inside": ("from moefold.model.norm import RMSNorm as N\nreturn N(3)", "uses moefold.model.norm.RMSNorm"),
    "an import of a module": ("return norms.RMSNorm(3)", "uses moefold.model.norm.RMSNorm"),
    "an import in two steps": (
        "import moefold\nreturn moefold.model.norm.RMSNorm(3)",
        "uses moefold.model.norm.RMSNorm",
    ),
    "an import by text": ('__import__("moefold.model.norm")', "uses __import__"),
    "sys": ('return sys.modules["moefold.model.norm"]', "uses sys.modules"),
    "a module of a library": ('return typing.sys.modules["moefold.model.norm"]', "uses typing.sys.modules"),
    "numpy": ("return lambda x, w, b: np.sqrt(x)", "uses numpy.sqrt"),
    "operators of the package": ("return torch.ops.moefold.norm", "uses torch.ops.moefold.norm"),
    "a module of torch": ("return torch.nn.RMSNorm(3)", "uses torch.nn.RMSNorm"),
    "code that torch loads": ('return torch.load("norm.pt")', "uses torch.load"),
    "a lambda": ("f = lambda part: part.build(3)\nreturn f(self)", "hands the part to f"),
    "a lambda around it": ("return lambda x, w, b, me=self: me.build(3)(x)", "hands on self"),
    "a lambda of the file": ("return outer(self)", "hands the part to outer"),
    "a nested class": ("class Inner:\n    part = self\nreturn Inner.part.build(3)", "has a class"),
    "a nested class without the part": ("class Inner(RMSNorm):\n    pass\nreturn Inner(3)", "has a class"),
    "a class of the file": ("return Holder().norm(3)", "uses Holder.norm"),
    "a table of the file": ('return TABLE["norm"](3)', "uses TABLE"),
    "a list": ("return [self][0].build(3)", "hands on self"),
    "a loop over it": ("for me in (self,):\n    return me.build(3)", "hands on self"),
    "a comprehension that hides it": ("return [self.build(3) for self in [self]]", "binds self again"),
    "a comprehension that hides an import": (
        "return [RMSNorm(3) for RMSNorm in [RMSNorm]]",
        "uses moefold.model.norm.RMSNorm",
    ),
    "a comprehension that binds an import": (
        "[0 for RMSNorm in ()]\nreturn RMSNorm(3)",
        "uses moefold.model.norm.RMSNorm",
    ),
    "a binding of it": ("self = self\nreturn self.build(3)", "binds self again"),
    "a nonlocal binding": (
        "def f():\n    nonlocal self\n    self = self\n    return self.build(3)\nreturn f",
        "binds self again",
    ),
    "a walrus": ("return (me := self).build(3)", "hands on self"),
    "a match": ("match self:\n    case me:\n        return me.build(3)", "hands on self"),
    "a partial": ("p = partial(of_part, self)\nreturn p.args[0].build(3)", "reads .args"),
    "a partial in a pattern": (
        "match partial(of_part, self):\n    case partial(args=a):\n        return a[0].build(3)",
        "reads .args",
    ),
    "a frame": ('g = (self.eps for _ in (1,))\nreturn g.gi_frame.f_locals["self"].build(3)', "reads .gi_frame"),
    "a closure": (
        "def f():\n    return self.eps\nreturn f.__closure__[0].cell_contents.build(3)",
        "reads .__closure__",
    ),
    "the part to a library": ("return functools.reduce(of_part, [self])", "uses functools.reduce"),
    "the part to a built-in": ("return list(self)", "hands the part to list"),
    "more arguments": ("return of_part(*(self,))", "hands on self"),
    "keywords": ("return of_part(**self)", "hands the part to of_part"),
    "a parameter of many": ("return many(self)", "hands the part to many"),
    "a part in a field": ("return self.inner.build()", "calls self.inner.build"),
    "an alias of a part in a field": ("inner = self.inner\nreturn inner.build()", "hands on self.inner"),
    "a choice of parts": ("return (self.inner or self.inner).build()", "hands on self.inner"),
    "a call of a field": ("return self.eps(3)", "calls self.eps"),
    "a call of a field of any type": ("return self.anything(3)", "calls self.anything"),
    "a field of any type": ("return lambda x, w, b: x + self.anything", "reads self.anything"),
    "a function of the group": ("return interpolate(0.0, 1.0, self.scale)", "uses interpolate()"),
    "a function that its methods use": (
        "return lambda x, w, b: shared(x)",
        "Mine.formula shares shared() with what it judges",
    ),
    "a function that is bound again": ("return again(3)", "uses again"),
    "a constant that is bound again": ("return LATER(3)", "uses LATER"),
    "a class that is changed": ("return Changed.norm(3)", "uses Changed.norm"),
    "a decorator": ("@RMSNorm\ndef f():\n    return 1\nreturn f", "uses moefold.model.norm.RMSNorm"),
    "a default": ("def f(m=RMSNorm):\n    return m(3)\nreturn f", "uses moefold.model.norm.RMSNorm"),
    "a global": ("global X\nX = self\nreturn X", "has a class"),
    "a format": ('return f"{self.build}"', "reads self.build"),
    "super": ("return super().build(3)", "uses super"),
    "another function of an oracle": ("return gates(self, 1)", "reads part.gate"),
    "a method of an argument": ("return lambda spec, w: spec.shard(2, 1, 1)", "reads .shard"),
    "a method as a tensor has it": ("return lambda spec, w: spec.numel(0)", "reads .numel"),
    "an attribute of an argument": ("return lambda step, w: step.model.norm(w)", "reads .model"),
    "an attribute in a pattern": (
        "match Pair(1.0):\n    case Pair(dp_shards=a):\n        return a",
        "reads .dp_shards",
    ),
    "a constant that training code computes": ("return COMPUTED[0]", "uses moefold.model.norm.RMSNorm"),
    "a constant with a type that is computed": ("return TYPED", "uses moefold.model.norm.RMSNorm"),
    "a constant that is set otherwise": ("return DECLARED", "uses DECLARED"),
}
TRICKS = """
def helper(p):
    return p.build(3)
def of_part(part):
    return part.scale
def many(*parts):
    return parts[0].build(3)
outer = lambda p: p.build(3)
class Holder:
    norm = RMSNorm
def again(x):
    return x
again = RMSNorm
LATER = 1.0
LATER = RMSNorm
COMPUTED = tuple(RMSNorm(3, 0.1).eps for i in range(2))
TYPED: float = RMSNorm(3, 0.1).eps
DECLARED: float
globals().update(DECLARED=RMSNorm(3, 0.1).eps)
class Changed:
    norm = math.sqrt
Changed.norm = RMSNorm
"""


@pytest.mark.parametrize("name", BAD)
def test_names_that_reach_the_judged_code_are_refused(tmp_path, name):
    body, reason = BAD[name]
    part = load(tmp_path, body, after=TRICKS)
    with pytest.raises(FormulaError, match=refusal(reason)):
        formula_reads(part)


UNWRITTEN = "Mine.formula is not one `def formula` in its class"
INIT = "Mine.{} may set the fields that its formula reads"
POST_INIT = "    def __post_init__(self):\n        object.__setattr__(self, 'eps', self.build(3))\n"
RETURN = "    def formula(self):\n        return self.eps\n"
WHOLE = {
    "a lambda": ("    formula = lambda self: self.build(3)\n", UNWRITTEN),
    "another function": ("    formula = outside\n", UNWRITTEN),
    "a property": ("    @property\n    def formula(self):\n        return 1\n", UNWRITTEN),
    "set from outside": ("    def formula(self):\n        return 1\nMine.formula = outside\n", UNWRITTEN),
    "a field that a property hides": (
        RETURN + "Mine.eps = property(lambda self: self.build(3))\n",
        "reads self.eps, which is not a field of the part",
    ),
    "a reader of attributes": (
        "    def __getattribute__(self, name):\n        return RMSNorm\n" + RETURN,
        "reads self.eps, which is not a field of the part",
    ),
    "a field that is set when the part is made": (POST_INIT + RETURN, INIT.format("__post_init__")),
    "a field that a function sets": (RETURN + "Mine.__post_init__ = outside\n", INIT.format("__post_init__")),
    "a field that another __init__ sets": (POST_INIT.replace("post_", "") + RETURN, INIT.format("__init__")),
    "inherited": ("    pass\nclass Heir(Mine):\n    pass\n", "calls self.build"),
}


@pytest.mark.parametrize("name", WHOLE)
def test_a_formula_is_a_method_that_its_class_writes(tmp_path, name):
    file = tmp_path / "mine.py"
    before = "def outside(self):\n    return self.build(3)\n"
    base = "class Base(NormPart):\n    def formula(self):\n        return self.build(3)\n"
    owner = "Base" if name == "inherited" else "NormPart"
    body, reason = WHOLE[name]
    file.write_text(f"{HEAD}{before}{base}class Mine({owner}):\n{body}")
    module = sys.modules[_module(file)]
    with pytest.raises(FormulaError, match=refusal(reason)):
        formula_reads(getattr(module, "Heir", module.Mine))


def test_the_fields_of_an_heir_may_be_read_in_an_inherited_formula(tmp_path):
    heir = "@dataclass(frozen=True, kw_only=True)\nclass Heir(Mine):\n    more: float = 1.0\n"
    part = load(tmp_path, "return self.scale", after=heir)
    assert formula_reads(sys.modules[part.__module__].Heir) == {"scale"}
    part = load(
        tmp_path, "return 1.0", after=heir + "    def formula(self):\n        return super().formula() * self.more\n"
    )
    assert formula_reads(sys.modules[part.__module__].Heir) == {"more"}
    part = load(
        tmp_path, "return self.build(3)", after=heir + "    def formula(self):\n        return super().formula()\n"
    )
    with pytest.raises(FormulaError, match="self.build"):
        formula_reads(sys.modules[part.__module__].Heir)


@pytest.mark.parametrize(
    ("oracle", "reason"),
    [
        ("import math\ndef scaled(part, x):\n    return math.exp(x) * part.scale\n", ""),
        ("def scaled(part, x):\n    return part.build(3)(x)\n", "calls part.build"),
        (
            "from moefold.model.norm import RMSNorm\ndef scaled(part, x):\n    return RMSNorm(3)(x)\n",
            "uses moefold.model.norm.RMSNorm",
        ),
        (
            "from PACKAGE.part import shared\ndef scaled(part, x):\n    return shared(x)\n",
            "Mine.formula shares shared() with what it judges",
        ),
        ("from PACKAGE.module import scaled\n", "hands the part to PACKAGE.module.scaled"),
        ("import numpy\ndef scaled(part, x):\n    return numpy.exp(x)\n", "uses numpy.exp"),
    ],
)
def test_functions_beside_the_part_follow_the_rule(tmp_path, monkeypatch, oracle, reason):
    # A module is imported once by its name.
    package = f"judged_{tmp_path.name}"
    folder = tmp_path / package
    folder.mkdir()
    for name, text in (("__init__", ""), ("module", "def scaled(part, x):\n    return x\n"), ("oracle", oracle)):
        (folder / f"{name}.py").write_text(text.replace("PACKAGE", package))
    body = f"from {package}.oracle import scaled\n        return partial(scaled, self)"
    (folder / "part.py").write_text(HEAD + PART.replace("{body}", body))
    monkeypatch.syspath_prepend(tmp_path)
    part = import_module(f"{package}.part").Mine
    if reason:
        with pytest.raises(FormulaError, match=refusal(reason.replace("PACKAGE", package))):
            formula_reads(part)
    else:
        assert formula_reads(part) == {"scale"}


def test_the_text_names_formula_file_and_line(tmp_path):
    with pytest.raises(FormulaError, match=r"^formula of Mine, moefold_part_\w+ line \d+: calls self.build"):
        formula_reads(load(tmp_path, "return self.build(3)"))


def test_only_formulas_import_an_oracle():
    """So that no function of an `oracle.py` is a part of the code that it judges."""
    for file in Path(moefold.parts.__file__).parents[1].rglob("*.py"):
        if file.name == "oracle.py" or "oracle" not in (text := file.read_text()):
            continue
        tree = ast.parse(text)
        formulas = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == "formula"]
        inside = {id(inner) for node in formulas for inner in ast.walk(node)}
        found = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and _is_oracle_of_part(node)]
        assert [node.module for node in found if id(node) not in inside] == []


def _is_oracle_of_part(node: ast.ImportFrom) -> bool:
    names = [f"{node.module}.{alias.name}" for alias in node.names] + [f"{node.module}"]
    return any(name.startswith("moefold.parts.") and name.endswith(".oracle") for name in names)


def test_a_formula_of_the_package_is_followed_to_other_oracles():
    assert {"gate.per", "num_heads", "kv_lora_rank"} <= formula_reads(find_part("attention", "mla"))
