"""The import graph of the package, read off the syntax trees: circles of modules and imports of higher floors."""

import ast
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from tests.architecture.rules import tree_of

LOOSE = (
    "__init__",
    "terminal",
    "units",
    "console",
    "bounded_read",
    "message_text",
    "errors",
    "file_lock",
    "progress",
    "cache_dir",
    "folder_files",
    "integer_hash",
    "package_table",
    "remote_path",
    "remote_copy",
    "hub",
)
"""Modules that lie beside the folders. They may import each other."""
FLOORS = {
    "base": ("host",),
    "facts": (
        "config.base",
        "config.sections",
        "config.groups",
        "config",
        "topology",
        "cost",
        "validate",
        "data",
        "rl",
        "recipe",
    ),
    "tensors": ("comm", "ops"),
    "model": ("model", "objectives", "offload", "optim"),
    "parts": ("parts",),
    "mapping": ("checkpoint", "metrics", "parallel"),
    "use": ("convert", "launch", "inference", "planner"),
    "training": ("train",),
    "checks": ("verify", "bench", "board", "lm_eval"),
    "interface": ("api", "cli", "__main__"),
}
"""The floors by name, lowest first, each with its folders and top-level modules, lowest first.

A module imports from its own folder and from lower ones: of lower floors, or earlier in the row of its floor. Folders
inside of a folder that are named here are its lower layers.
"""
TORCH_FREE = ("host", "config", "topology", "cost", "validate", "data", "rl", "planner", "board")
"""Folders that can be imported where torch is not installed."""


class Import(NamedTuple):
    """One import of a module of the package by another."""

    importer: str
    line: int
    imported: str
    name: str

    def __str__(self) -> str:
        return f"{self.importer}:{self.line} imports {self.name or self.imported} from {self.imported}"


def modules(package: Path) -> dict[str, Path]:
    """Return the files of a package by dotted name, without the name of the package; folders by their own name."""
    found = {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package).with_suffix("").parts
        if parts[-1] == "__init__" and len(parts) > 1:
            parts = parts[:-1]
        found[".".join(parts)] = path
    return found


def imports(package: Path) -> list[Import]:
    """Return every import inside the package, those inside functions and for type checkers included."""
    files = modules(package)
    return [found for name, path in files.items() for found in _imports_of(name, path, files, package.name)]


class Loaded(NamedTuple):
    """Find the modules that the import of a module loads, by the syntax trees."""

    modules: set[str]
    """Modules of the package, folders included."""
    libraries: set[str]
    """Names of modules of other packages than the standard library."""


def loaded(package: Path, module: str) -> Loaded:
    """Return the modules that the import of a module loads: its own imports outside of functions, and theirs."""
    files = modules(package)
    found = Loaded({"__init__"}, set())
    waiting = [module]
    while waiting:
        name = waiting.pop()
        if name in found.modules or name not in files:
            continue
        found.modules.add(name)
        tree = ast.parse(files[name].read_text())
        waiting += [one.imported for one in _imports_at_load(tree, name, files, package.name)]
        waiting.append(name.rpartition(".")[0])
        found.libraries.update(_libraries(tree, package.name))
    return found


def late_without_effect(package: Path) -> list[Import]:
    """Return the imports inside functions of modules that the import of their own module has loaded already."""
    files = modules(package)
    at_load = {
        name: {one.imported for one in _imports_at_load(tree_of(path), name, files, package.name)}
        for name, path in files.items()
    }
    found = []
    for name, path in files.items():
        loaded_before = _reachable(name, at_load)
        inside = {one for node in _late(tree_of(path)) for one in _imports_of_node(node, name, files, package.name)}
        found += sorted(one for one in inside if one.imported in loaded_before)
    return found


def _late(tree: ast.Module) -> Iterator[ast.stmt]:
    """Yield the imports that do not run when the module is imported, without the ones for type checkers."""
    blocks = [one for one in tree.body if isinstance(one, ast.If) and "TYPE_CHECKING" in ast.unparse(one.test)]
    not_late = {node for block in blocks for node in ast.walk(block)} | set(_statements_at_load(tree))
    yield from (
        node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom) and node not in not_late
    )


def _reachable(name: str, at_load: Mapping[str, set[str]]) -> set[str]:
    reached: set[str] = set()
    waiting = [name]
    while waiting:
        fresh = at_load[waiting.pop()] - reached
        reached |= fresh
        waiting += fresh
    return reached


def upward(found: list[Import]) -> list[Import]:
    """Return the imports of a module of a higher folder than the importer's."""
    height = heights()
    return [one for one in found if height[room(one.imported)] > height[room(one.importer)]]


def heights() -> dict[str, int]:
    """Return the height of every folder and top-level module; 0 for all loose modules."""
    folders = [name for names in FLOORS.values() for name in names]
    return dict.fromkeys(LOOSE, 0) | {name: height for height, name in enumerate(folders, 1)}


def circles(found: list[Import]) -> list[list[str]]:
    """Return the strongly connected components of more than one module (Tarjan's algorithm)."""
    graph: dict[str, set[str]] = {}
    for one in found:
        graph.setdefault(one.importer, set()).add(one.imported)
        graph.setdefault(one.imported, set())
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    components = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for neighbour in sorted(graph[node]):
            if neighbour not in index:
                visit(neighbour)
                low[node] = min(low[node], low[neighbour])
            elif neighbour in stack:
                low[node] = min(low[node], index[neighbour])
        if low[node] == index[node]:
            component = stack[stack.index(node) :]
            del stack[stack.index(node) :]
            if len(component) > 1:
                components.append(sorted(component))

    for node in sorted(graph):
        if node not in index:
            visit(node)
    return components


def _statements_at_load(tree: ast.Module) -> Iterator[ast.stmt]:
    """Yield the statements that run when a module is imported; those for type checkers do not."""
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            waiting += node.orelse
            continue
        if isinstance(node, ast.stmt):
            yield node
        waiting += ast.iter_child_nodes(node)


def _imports_at_load(tree: ast.Module, name: str, files: Mapping[str, Path], package: str) -> Iterator[Import]:
    for node in _statements_at_load(tree):
        yield from _imports_of_node(node, name, files, package)


def _libraries(tree: ast.Module, package: str) -> Iterator[str]:
    for node in _statements_at_load(tree):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        yield from (one for one in names if one.split(".")[0] not in (package, *sys.stdlib_module_names))


def room(module: str) -> str:
    """Return the folder or top-level module with a module: the innermost one that `FLOORS` names, or the outermost."""
    named = {name for names in FLOORS.values() for name in names}
    name = module
    while name not in named and "." in name:
        name = name.rpartition(".")[0]
    return name


def _imports_of(name: str, path: Path, files: Mapping[str, Path], package: str) -> Iterator[Import]:
    for node in ast.walk(tree_of(path)):
        yield from _imports_of_node(node, name, files, package)


def _imports_of_node(node: ast.AST, name: str, files: Mapping[str, Path], package: str) -> Iterator[Import]:
    if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == package:
        base = node.module.removeprefix(package).lstrip(".")
        for alias in node.names:
            target = _module_of(f"{base}.{alias.name}".lstrip("."), files)
            if target != name:
                yield Import(name, node.lineno, target, alias.name)
    elif isinstance(node, ast.Import):
        for alias in node.names:
            if alias.name.startswith(f"{package}."):
                yield Import(name, node.lineno, _module_of(alias.name.removeprefix(f"{package}."), files), "")


def _module_of(dotted: str, files: Mapping[str, Path]) -> str:
    """Return the longest prefix that is a module; names of the package itself stand in its __init__."""
    while dotted and dotted not in files:
        dotted = dotted.rpartition(".")[0]
    return dotted or "__init__"


def imports_torch(modules: list[str], path: str = "") -> list[str]:
    """The modules that bring torch along, each tried in a process that would refuse it."""
    code = (
        "import importlib, sys\n"
        f"sys.path[:0] = [{path!r}] if {path!r} else []\n"
        "class Refuse:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] == 'torch':\n"
        "            raise ImportError('torch is refused here')\n"
        "sys.meta_path.insert(0, Refuse())\n"
        f"for name in {modules!r}:\n"
        "    try:\n"
        "        importlib.import_module(name)\n"
        "    except ImportError as error:\n"
        "        print(f'{name}: {error}')\n"
    )
    result = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60)
    return result.stdout.splitlines()
