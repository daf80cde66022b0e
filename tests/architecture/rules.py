"""The rules of the house, read off the syntax tree: budgets, where communication may stand, names, leftovers.

Every rule takes files and returns findings, one line each, so that a test can feed it a file that breaks the rule.
"""

import ast
import re
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "moefold"
TESTS = ROOT / "tests"

COMMUNICATES = (
    "comm",
    "parallel",
    "optim",
    "parts/optimizer/muon",
    "model/moe/dispatch",
    "checkpoint",
    "launch",
)
STATE_TYPES = {f"torch.distributed.tensor.{name}" for name in ("DTensor", "Partial", "Placement", "Replicate", "Shard")}
VAGUE_NAMES = ("utils", "util", "helpers", "helper", "misc", "common")
LEFTOVER = re.compile(r"\b(TO" + r"DO|FIX" + r"ME|XX" + r"X)\b")
BLOCKS = (ast.If, ast.For, ast.AsyncFor, ast.While, ast.With, ast.AsyncWith, ast.Try, ast.TryStar, ast.Match)
BLOCK_FIELDS = ("body", "handlers", "orelse", "finalbody", "cases")
MUTABLE_CALLS = ("dict", "list", "set", "defaultdict", "deque", "Counter", "OrderedDict")
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Exceeded:
    """An exceeded budget: its place (`path` or `path::Class.name`), its name, its value and its limit."""

    where: str
    rule: str
    value: int
    limit: int

    def __str__(self) -> str:
        return f"{self.where}: {self.rule} is {self.value}, at most {self.limit}"


def settings() -> dict:
    """The table [tool.moefold.budgets] of pyproject.toml."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["moefold"]["budgets"]


def python_files(*folders: Path) -> list[Path]:
    """All Python files below the folders, sorted."""
    return sorted(path for folder in folders for path in folder.rglob("*.py"))


def tree_of(path: Path) -> ast.Module:
    """Return the syntax tree of a file; a file of the package is parsed once for all rules."""
    text = path.read_text()
    return _parsed(text) if path.is_relative_to(SOURCE) else ast.parse(text)


@cache
def _parsed(text: str) -> ast.Module:
    return ast.parse(text)


def name_of(path: Path, root: Path = ROOT) -> str:
    """The path as messages and exceptions spell it."""
    return path.relative_to(root).as_posix() if path.is_relative_to(root) else path.as_posix()


def exceeded_budgets(path: Path, limits: dict, root: Path = ROOT) -> Iterator[Exceeded]:
    """The budgets that one file exceeds, exceptions not yet taken into account."""
    name = name_of(path, root)
    yield from _over(name, "file_lines", path.read_text().count("\n"), limits)
    for qualified, node in _definitions(tree_of(path), ""):
        where = f"{name}::{qualified}"
        if isinstance(node, ast.ClassDef):
            yield from _over(where, "class_members", len(_public_members(node)), limits)
        else:
            yield from _over(where, "function_lines", _lines_of(node), limits)
            yield from _over(where, "parameters", _num_parameters(node), limits)
            yield from _over(where, "nesting", _nesting(node.body), limits)


def unexcused(found: Iterable[Exceeded], exceptions: list[dict]) -> list[str]:
    """The findings that no exception covers, and the exceptions that lack a reason or cover nothing."""
    found = list(found)
    problems = []
    for finding in found:
        covers = [e for e in exceptions if (e["where"], e["rule"]) == (finding.where, finding.rule)]
        if not any(finding.value <= e["limit"] for e in covers):
            problems.append(str(finding))
    places = {(finding.where, finding.rule) for finding in found}
    for exception in exceptions:
        if not exception.get("reason", "").strip():
            problems.append(f"{exception['where']}: an exception needs a reason")
        if (exception["where"], exception["rule"]) not in places:
            problems.append(f"{exception['where']}: the exception for {exception['rule']} is no longer needed")
    return problems


def stray_communication(path: Path, source: Path = SOURCE) -> list[str]:
    """Uses of torch.distributed outside the packages that may communicate.

    The types of a parameter's state (DTensor and its placements) may stand anywhere; groups and meshes may not, even in
    annotations: a component takes a group object of `parallel`.
    """
    inside = path.relative_to(source).as_posix()
    if inside.startswith(tuple(f"{package}/" for package in COMMUNICATES)):
        return []
    found = []
    for node in ast.walk(tree_of(path)):
        for module in _imported(node):
            if (module == "torch.distributed" or module.startswith("torch.distributed.")) and module not in STATE_TYPES:
                found.append(f"{inside}:{node.lineno}: imports {module}")
        if isinstance(node, ast.Attribute) and _dotted(node).startswith(("torch.distributed.", "dist.")):
            found.append(f"{inside}:{node.lineno}: uses {_dotted(node)}")
    return found


def module_state(path: Path, root: Path = ROOT) -> list[str]:
    """State that a module keeps: a `global` statement, or an empty container that is there to be filled."""
    name = name_of(path, root)
    tree = tree_of(path)
    found = [
        f"{name}:{node.lineno}: global {', '.join(node.names)}"
        for node in ast.walk(tree)
        if isinstance(node, ast.Global)
    ]
    for node in tree.body:
        value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
        if value is not None and _is_empty_container(value):
            found.append(f"{name}:{node.lineno}: a module-level container that starts empty")
    return found


def vague_name(path: Path) -> list[str]:
    """A file whose name says nothing."""
    return [f"{path.name}: name the idea"] if path.stem in VAGUE_NAMES else []


def leftovers(path: Path, root: Path = ROOT) -> list[str]:
    """Marks of unfinished work."""
    lines = path.read_text().splitlines()
    return [f"{name_of(path, root)}:{i}: {line.strip()}" for i, line in enumerate(lines, 1) if LEFTOVER.search(line)]


def _over(where: str, rule: str, value: int, limits: dict) -> Iterator[Exceeded]:
    if value > limits[rule]:
        yield Exceeded(where, rule, value, limits[rule])


def _definitions(node: ast.AST, prefix: str) -> Iterator[tuple[str, Function | ast.ClassDef]]:
    # Definitions are statements, which stand only in blocks: expressions need no visit.
    for child in (child for block in BLOCK_FIELDS for child in getattr(node, block, ())):
        if isinstance(child, Function | ast.ClassDef):
            yield f"{prefix}{child.name}", child
            yield from _definitions(child, f"{prefix}{child.name}.")
        else:
            yield from _definitions(child, prefix)


def _lines_of(node: Function) -> int:
    """Lines of a function with its docstring, without its decorators."""
    return node.end_lineno - node.lineno + 1


def _num_parameters(node: Function) -> int:
    arguments = node.args
    names = [a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    receiver = 1 if names[:1] in (["self"], ["cls"], ["ctx"]) else 0
    return len(names) - receiver + (arguments.vararg is not None) + (arguments.kwarg is not None)


def _nesting(body: list[ast.stmt]) -> int:
    """Depth of blocks; `elif` stands beside its `if`, and inner definitions are counted by themselves."""
    deepest = 0
    for node in body:
        if isinstance(node, BLOCKS):
            deepest = max(deepest, 1 + max(_nesting(part) for part in _parts(node)))
    return deepest


def _parts(node: ast.stmt) -> Iterator[list[ast.stmt]]:
    yield getattr(node, "body", [])
    orelse = getattr(node, "orelse", [])
    while isinstance(node, ast.If) and len(orelse) == 1 and isinstance(orelse[0], ast.If):
        yield orelse[0].body
        orelse = orelse[0].orelse
    yield orelse
    yield getattr(node, "finalbody", [])
    for inner in (*getattr(node, "handlers", []), *getattr(node, "cases", [])):
        yield inner.body


def _public_members(node: ast.ClassDef) -> set[str]:
    """Public methods and properties. Fields of a dataclass are its matter, not its surface."""
    return {item.name for item in node.body if isinstance(item, Function) and not item.name.startswith("_")}


def _imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.module and not node.level:
        return [f"{node.module}.{alias.name}" for alias in node.names]
    return []


def _dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def _is_empty_container(value: ast.expr) -> bool:
    if isinstance(value, ast.Dict):
        return not value.keys
    if isinstance(value, ast.List | ast.Set):
        return not value.elts
    return isinstance(value, ast.Call) and _dotted(value.func).split(".")[-1] in MUTABLE_CALLS and not value.args
