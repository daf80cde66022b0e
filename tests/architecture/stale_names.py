"""Names in docstrings and pages that the code no longer has: arguments of functions, attributes of classes."""

import ast
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from tests.architecture.rules import ROOT, name_of, tree_of

ARGUMENTS = re.compile(r"^    (\*{0,2}\w+(?:, \*{0,2}\w+)*):", re.MULTILINE)
ATTRIBUTE = re.compile(r"`([A-Z]\w+)\.(\w+)(?:\(\))?`")


class Classes:
    """The names that each class of some files defines, its bases included. Classes of one name count as one."""

    def __init__(self, files: Iterable[Path]) -> None:
        self._names: dict[str, set[str]] = {}
        self._bases: dict[str, set[str]] = {}
        for path in files:
            for node in ast.walk(tree_of(path)):
                if isinstance(node, ast.ClassDef):
                    self._names.setdefault(node.name, set()).update(_stored(node))
                    bases = {ast.unparse(base).split("[")[0].rpartition(".")[2] for base in node.bases}
                    self._bases.setdefault(node.name, set()).update(bases)

    def has(self, name: str, attribute: str) -> bool:
        """Return whether a class, or a base of it, defines an attribute; a class of another package has every one."""
        if name not in self._names:
            return True
        return attribute in self._names[name] or any(self.has(base, attribute) for base in self._bases[name] - {name})


def stale_arguments(path: Path, root: Path = ROOT) -> Iterator[str]:
    """Yield the names under `Args:` in the docstrings of a file that the function does not take."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            section = (ast.get_docstring(node) or "").partition("\nArgs:\n")[2]
            section = re.split(r"\n(?=\S)", section)[0]
            documented = [name.strip(" *") for names in ARGUMENTS.findall(section) for name in names.split(",")]
            taken = _stored(node) if isinstance(node, ast.ClassDef) else _parameters(node)
            for name in documented:
                if name not in taken and not (isinstance(node, ast.ClassDef) and node.bases):
                    yield f"{name_of(path, root)}:{node.lineno}: {node.name} has no {name}"


def stale_attributes(path: Path, classes: Classes, root: Path = ROOT) -> Iterator[str]:
    """Yield the passages "`Class.name`" of a file whose class has no such name."""
    for number, line in enumerate(path.read_text().splitlines(), 1):
        for found in ATTRIBUTE.finditer(line):
            if not classes.has(found[1], found[2]):
                yield f"{name_of(path, root)}:{number}: {found[0]}"


def _parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    return {argument.arg for argument in ast.walk(node.args) if isinstance(argument, ast.arg)}


def _stored(node: ast.ClassDef) -> set[str]:
    """Return the names of the methods, fields, attributes and constructor arguments of a class."""
    found = set()
    for part in ast.walk(node):
        if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(part.name)
        elif isinstance(part, ast.arg):
            found.add(part.arg)
        elif isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store):
            found.add(part.id)
        elif isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store):
            found.add(part.attr)
    return found
