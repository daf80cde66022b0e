"""Uses of torch's private names, read off the syntax trees: imports, dotted names and attributes of objects."""

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path

from tests.architecture.rules import tree_of

OTHER_LIBRARIES = frozenset({"_asdict", "_replace", "_fields", "_make", "_exit", "_current_frames", "_actions"})
"""Private-looking names of the standard library; argparse lists the arguments of a parser nowhere else."""


def private_torch_names(paths: Iterable[Path]) -> Iterator[str]:
    """Yield "file:line name" for each private name of torch that a file uses.

    An attribute counts as torch's if its name begins with one underscore and no file of the package defines it.
    """
    trees = {path: tree_of(path) for path in paths}
    defined = OTHER_LIBRARIES.union(*map(_defined_names, trees.values()))
    for path, tree in trees.items():
        for line, name in sorted(set(_uses(tree, defined))):
            yield f"{path}:{line} {name}"


def _uses(tree: ast.AST, defined: frozenset[str]) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            for alias in node.names:
                dotted = f"{node.module}.{alias.name}"
                if any(map(_is_private, dotted.split("."))):
                    yield node.lineno, dotted
        elif isinstance(node, ast.Import):
            for alias in node.names:
                parts = alias.name.split(".")
                if parts[0] == "torch" and any(map(_is_private, parts)):
                    yield node.lineno, alias.name
        elif isinstance(node, ast.Attribute) and _is_private(node.attr):
            text = ast.unparse(node)
            if text.startswith("torch.") or node.attr not in defined:
                yield node.lineno, text
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("getattr", "hasattr"):
            name = node.args[1].value if isinstance(node.args[1], ast.Constant) else ""
            if isinstance(name, str) and _is_private(name) and name not in defined:
                yield node.lineno, name


def _defined_names(tree: ast.AST) -> set[str]:
    """Return the names that a file defines: functions, classes, fields, and attributes that it assigns."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            found.add(node.id if isinstance(node, ast.Name) else node.attr)
    return found


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")
