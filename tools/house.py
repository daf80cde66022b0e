"""Count the debts of the code's structure, and refuse a rise: `python tools/house.py` prints every count.

A count has a definition in `COUNTS`, a number for each file in `house.json`, and a goal. It may only fall: if a count
has risen, the program names it with its new places, and exits with status 1. `--write` stores lower counts. Counts
without a debt (lines, tests) are shown, and may rise. The program only reads syntax trees; it does not import the
package.
"""

import argparse
import ast
import json
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
BASELINE = Path(__file__).with_suffix(".json")
PACKAGE = "moefold"
SCHEMA = f"{PACKAGE}.config.schema"


def _set(words: str) -> frozenset[str]:
    """Return the words of a text."""
    return frozenset(words.split())


REGISTRIES = _set(
    "ATTENTIONS FEED_FORWARDS ATTENTION_MEMORY FEED_FORWARD_MEMORY LINEAR_ATTENTION_MEMORY ATTENTION_BUILDERS "
    "FEED_FORWARD_BUILDERS DISPATCHERS BUILDERS UNSUPPORTED_REASONS SCHEDULES CLOSED_FORMS OPTIMIZERS"
)
"""Tables of a module from the name of a kind to its object or function."""
LAYER_LETTERS = frozenset("DMFWCLSRN") | {"DL", "ML", "DS", "MS"}
"""Letters of layer, attention, index and RoPE patterns, and of kinds of layers."""
OTHER_LETTERS = {
    "cost/peak_candidates.py": "FW",
    "cost/auto_layout_memory.py": "FW",
    "launch/job_file.py": "M",
    "parallel/pipeline_schedule.py": "FW",
    "cli/timeline_file.py": "FW",
    "planner/simulator/simulate.py": "FW",
    "planner/simulator/timeline.py": "F",
    "topology/collective_order.py": "FRW",
    "topology/message_plan.py": "FW",
    "config/base/pipeline_actions.py": "FW",
    "topology/pipeline_layout.py": "L",
}
"""Letters that mean something else in a file: actions of a pipeline, trace events, units."""
STRING_METHODS = _set(
    "count endswith find index lstrip partition removeprefix removesuffix replace rpartition rstrip split startswith "
    "strip"
)
PART_KEYS = _set(
    "activation advantage attention aux_kind choice context correction dense dispatch_precision dispatcher drop_policy "
    "drop_scope indexer kl_kind linear_attention loss lr_schedule method moe norm objective optimizer residual router "
    "scaling schedule softmax"
)
"""Keys of a recipe whose value is the kind of a part; a leading underscore of an attribute is ignored."""
KIND_WORDS = _set(
    "gqa mla gated_deltanet kda gla short_convolution rmsnorm layernorm sigmoid sqrtsoftplus sparsemixer swiglu "
    "clamped_swiglu longrope yarn llama3 allgather alltoall dedup_alltoall leastloaded deepep symm_mem adamw muon "
    "spsa gpipe 1f1b interleaved zero_bubble zbv dualpipev cosine wsd cispo kto simpo dpo ipo sinkhorn quantile"
)
"""Values of those keys without another meaning."""
MLA_ROOMS = ("config/model.py", "config/layers.py")
"""Modules in which the kind may be written out, besides the readers of Hugging Face families."""
PART_CLASSES = ("parts/", "config/groups/")
"""Folders of parts and of their base classes."""
PART_LOADERS = _set(
    "config/base/part_registry.py config/base/part.py config/chosen.py config/tables/build.py "
    "config/tables/part_class.py config/tables/toml_text.py"
)
"""Modules in which parts of any group differ from other values, and are checked to be of their group."""
PRODUCT = _set("planner verify convert inference rl board bench cli api lm_eval __main__")
"""Folders and modules that use the core: everything else of the package is core."""
TEXT_FOLDERS = ("src", "tests", "benchmarks", "experiments")
"""Folders of code whose text is counted together with the pages."""
THAT_OF = re.compile(r"\b(that|those)\s+of\b", re.IGNORECASE)
TEST = re.compile(r"^\s*(async )?def test_", re.MULTILINE)
Function = ast.FunctionDef | ast.AsyncFunctionDef


class Place(NamedTuple):
    """One occurrence of a count."""

    group: str
    """File (or folder, or name) by which the baseline counts."""
    where: str

    def __str__(self) -> str:
        return self.where


Places = list[Place]


@dataclass(frozen=True)
class Count:
    """A number with its definition."""

    name: str
    definition: str
    goal: str
    may_rise: bool = False


COUNTS = (
    Count("registries", "tables of a module with one of the names in REGISTRIES", "0"),
    Count("kind_tables", "displays of a dict with two or more keys that are KIND_WORDS", "falls"),
    Count(
        "layer_letters",
        "comparisons with, and string methods that take, a letter of layers (LAYER_LETTERS less OTHER_LETTERS)",
        "0 outside layers_of and the schema",
    ),
    Count(
        "kind_comparisons",
        "comparisons and match statements of an attribute named in PART_KEYS with strings of two or more letters",
        "0 outside layers_of, the schema and conversion's readers",
    ),
    Count(
        "bare_kind_comparisons",
        "comparisons and match statements with one of KIND_WORDS of anything but an attribute",
        "falls",
    ),
    Count(
        "comparisons", "comparisons and match statements of an attribute with strings of two or more letters", "<= 500"
    ),
    Count(
        "predicate_reads",
        "reads of a property or function that returns bool and holds a comparison of a kind or a letter of layers",
        "falls",
    ),
    Count(
        "part_type_tests",
        "tests of the type of an object (isinstance, issubclass, type() is, a class in match) against a class of "
        "PART_CLASSES, outside its own file, the folder of its part, and PART_LOADERS",
        "0",
    ),
    Count(
        "flags_of_one_kind",
        "ClassVar[bool] of a base class in config/groups/ that one kind of parts/ alone sets, and whose name "
        "other files than the base class and parts/ read",
        "falls",
    ),
    Count("config_parameters", "parameters annotated Config, under whatever name it is imported", "<= 340"),
    Count(
        "holder_parameters",
        "parameters annotated with a class that has Config as a field, a property or a parameter of its __init__",
        "falls",
    ),
    Count("schema_importers", "files that import config.schema, or Config from elsewhere", "<= 110"),
    Count("range_rules", "calls of RangeRule", "0"),
    Count("unused_key_rules", "calls of UnusedKeyRule", "<= 85, then 30"),
    Count("mla", 'the string "mla" outside MLA_ROOMS and the readers of families', "0"),
    Count("oracle_branches", "kind_comparisons and bare_kind_comparisons in verify/oracle*.py", "0"),
    Count("class_names_twice", "names of classes at the top of two or more files", "0"),
    Count("that_of", '"that of" and "those of" in the code and in all pages but docs/log.md', "0"),
    Count("package_lines", "lines of Python in the package", "falls", may_rise=True),
    Count("package_files", "files of Python in the package", "falls", may_rise=True),
    Count("core_lines", "lines of Python in the package outside PRODUCT", "<= 65,000", may_rise=True),
    Count("trainer_modules", "modules that an import of train.trainer runs, lazy imports apart", "<= 220", True),
    Count("trainer_lines", "lines of these modules", "<= 38,000", may_rise=True),
    Count("tests", "test functions, by folder", "a test goes with the thing that it tests", may_rise=True),
)
BY_NAME = {count.name: count for count in COUNTS}


@dataclass
class FileFacts:
    """Facts of one file, and its places of each count."""

    name: str
    """Path below the package."""
    lines: int = 0
    places: dict[str, Places] = field(default_factory=lambda: defaultdict(list))
    classes: dict[str, int] = field(default_factory=dict)
    aliases: set[str] = field(default_factory=set)
    """Names of this file that are Config."""
    holders: set[str] = field(default_factory=set)
    predicates: set[str] = field(default_factory=set)
    parameters: list[tuple[frozenset[str], int, str]] = field(default_factory=list)
    """Names in the annotation, line, and name of each parameter."""
    reads: list[tuple[str, int]] = field(default_factory=list)
    """Attributes that are read and functions that are called, with the line."""
    type_tests: list[tuple[frozenset[str], int, str]] = field(default_factory=list)
    """Names of classes that the type of an object is tested against, line, and text of each test."""
    flags: list[tuple[str, int, str]] = field(default_factory=list)
    """Class variables of type bool that the classes of PART_CLASSES set, with the line and the class."""
    groups: set[str] = field(default_factory=set)
    """Groups of parts whose base class is here: modules and folders of parts/."""
    imported: set[str] = field(default_factory=set)
    """Dotted names that the import of the file imports."""

    def add(self, count: str, line: int, text: str = "") -> None:
        """Record one place of a count."""
        self.places[count].append(Place(self.name, f"{self.name}:{line}{': ' if text else ''}{text}"))


def read_file(path: Path, package: Path) -> FileFacts:
    """Read the facts of one file of the package."""
    text = path.read_text()
    tree = ast.parse(text)
    facts = FileFacts(path.relative_to(package).as_posix(), text.count("\n"))
    _read_module(tree, facts)
    facts.imported.update(_eager_imports(tree.body))
    for node in ast.walk(tree):
        _read_node(node, facts)
    return facts


def _read_module(tree: ast.Module, facts: FileFacts) -> None:
    """Read the classes, registries and aliases of Config at the top of a module."""
    for imported in ast.walk(tree):
        if isinstance(imported, ast.ImportFrom) and (imported.module or "").startswith(PACKAGE):
            facts.aliases |= {alias.asname or alias.name for alias in imported.names if alias.name == "Config"}
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            facts.classes[node.name] = node.lineno
        if not isinstance(node, ast.Assign | ast.AnnAssign):
            continue
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        names = [target.id for target in targets if isinstance(target, ast.Name)]
        for name in names:
            if name.lstrip("_") in REGISTRIES and isinstance(node.value, ast.Dict | ast.DictComp):
                facts.add("registries", node.lineno, name)
        value = node.value
        if isinstance(value, ast.Name | ast.BinOp | ast.Subscript) and _names(value) & {"Config", *facts.aliases}:
            facts.aliases.update(names)
    if facts.name == SCHEMA.removeprefix(f"{PACKAGE}.").replace(".", "/") + ".py":
        facts.aliases.add("Config")


def _read_node(node: ast.AST, facts: FileFacts) -> None:
    """Read the facts of one node."""
    if isinstance(node, ast.expr | ast.MatchClass) and (names := _tested_types(node)):
        facts.type_tests.append((names, getattr(node, "lineno", 0), ast.unparse(node)))
    match node:
        case ast.Compare() | ast.Match():
            _read_comparison(node, facts)
        case ast.Call():
            _read_call(node, facts)
        case ast.Attribute(ctx=ast.Load()):
            facts.reads.append((node.attr, node.lineno))
        case ast.Constant(value="mla"):
            if facts.name not in MLA_ROOMS and not facts.name.endswith("families.py"):
                facts.add("mla", node.lineno)
        case ast.Dict():
            if len({key.value for key in node.keys if isinstance(key, ast.Constant)} & KIND_WORDS) > 1:
                facts.add("kind_tables", node.lineno)
        case ast.ClassDef():
            if any(_holds_config(item, facts) for item in node.body):
                facts.holders.add(node.name)
            if facts.name.startswith(PART_CLASSES):
                _read_flags(node, facts)
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            _read_function(node, facts)
        case ast.ImportFrom():
            is_schema = node.module == SCHEMA or SCHEMA in {f"{node.module}.{alias.name}" for alias in node.names}
            if is_schema or (node.module or "").startswith(PACKAGE) and "Config" in {a.name for a in node.names}:
                _add_once(facts, "schema_importers", node.lineno)
        case ast.Import():
            if SCHEMA in {alias.name for alias in node.names}:
                _add_once(facts, "schema_importers", node.lineno)


def _tested_types(node: ast.AST) -> frozenset[str]:
    """Return the names of the classes that a node tests the type of an object against."""
    match node:
        case ast.Call(func=ast.Name(id="isinstance" | "issubclass"), args=[_, classes]):
            return _names(classes)
        case ast.Compare(
            left=left, comparators=[right], ops=[ast.Is() | ast.IsNot() | ast.Eq() | ast.NotEq() | ast.In()]
        ):
            sides = left, right
            if any(isinstance(side, ast.Call) and ast.unparse(side.func) == "type" for side in sides):
                return frozenset().union(*(_names(side) for side in sides if not isinstance(side, ast.Call)))
        case ast.MatchClass(cls=found):
            return _names(found)
    return frozenset()


def _add_once(facts: FileFacts, count: str, line: int) -> None:
    if not facts.places[count]:
        facts.add(count, line)


def _read_comparison(node: ast.Compare | ast.Match, facts: FileFacts) -> None:
    subjects, words = _compared(node)
    line = node.lineno
    attributes = [subject.attr.lstrip("_") for subject in subjects if isinstance(subject, ast.Attribute)]
    long_words = [word for word in words if len(word) > 1]
    text = ast.unparse(node) if isinstance(node, ast.Compare) else f"match {ast.unparse(node.subject)}"
    if _layer_letters(words, facts.name):
        facts.add("layer_letters", line, text)
    if attributes and long_words:
        facts.add("comparisons", line, text)
        if PART_KEYS & set(attributes):
            facts.add("kind_comparisons", line, text)
    if not attributes and KIND_WORDS & set(words):
        facts.add("bare_kind_comparisons", line, text)
    is_of_kind = attributes and long_words and PART_KEYS & set(attributes) or KIND_WORDS & set(words)
    if is_of_kind and facts.name.startswith("verify/oracle"):
        facts.add("oracle_branches", line, text)


def _compared(node: ast.Compare | ast.Match) -> tuple[list[ast.expr], list[str]]:
    """Return the compared expression, and the words that it is compared with."""
    if isinstance(node, ast.Compare):
        sides = [node.left, *node.comparators]
        return sides, [word for side in sides for word in _words(side)]
    patterns = [inner for case in node.cases for inner in ast.walk(case.pattern)]
    values = [pattern.value for pattern in patterns if isinstance(pattern, ast.MatchValue)]
    return [node.subject], [word for value in values for word in _words(value)]


def _words(node: ast.expr) -> Iterator[str]:
    """Yield the strings of a constant, of a display of them, and of a call that makes a set or tuple of them."""
    match node:
        case ast.Constant(value=str(text)):
            yield text
        case ast.Tuple() | ast.List() | ast.Set():
            for element in node.elts:
                yield from _words(element)
        case ast.Call(func=ast.Name(id="set" | "frozenset" | "tuple")):
            for argument in node.args:
                yield from _words(argument)


def _layer_letters(words: Iterable[str], name: str) -> frozenset[str]:
    return (LAYER_LETTERS & set(words)) - set(OTHER_LETTERS.get(name, ""))


def _read_call(node: ast.Call, facts: FileFacts) -> None:
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    if isinstance(node.func, ast.Name):
        facts.reads.append((name, node.lineno))
    if name == "RangeRule":
        facts.add("range_rules", node.lineno)
    elif name == "UnusedKeyRule":
        facts.add("unused_key_rules", node.lineno)
    elif name in STRING_METHODS and _layer_letters([w for arg in node.args for w in _words(arg)], facts.name):
        facts.add("layer_letters", node.lineno, ast.unparse(node))


def _read_function(node: Function, facts: FileFacts) -> None:
    arguments = node.args
    every = (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg)
    for argument in every:
        if argument is not None and argument.annotation is not None:
            facts.parameters.append((_names(argument.annotation), argument.lineno, f"{node.name}({argument.arg})"))
    if node.returns is not None and _names(node.returns) == {"bool"} and _asks_for_a_kind(node, facts.name):
        facts.predicates.add(node.name)


def _asks_for_a_kind(node: Function, name: str) -> bool:
    """Return whether the body of a function compares the kind of a part, or a letter of layers."""
    scratch = FileFacts(name)
    for inner in ast.walk(node):
        if isinstance(inner, ast.Compare | ast.Match):
            _read_comparison(inner, scratch)
        elif isinstance(inner, ast.Call):
            _read_call(inner, scratch)
    return bool(scratch.places["kind_comparisons"] or scratch.places["layer_letters"])


def _holds_config(node: ast.stmt, facts: FileFacts) -> bool:
    """Return whether a member of a class is, returns or takes a Config."""
    configs = {"Config", *facts.aliases}
    if isinstance(node, ast.AnnAssign):
        return bool(_names(node.annotation) & configs)
    if not isinstance(node, Function):
        return False
    if node.name == "__init__":
        arguments = (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
        return any(_names(argument.annotation) & configs for argument in arguments if argument.annotation)
    is_property = any("property" in ast.unparse(decorator) for decorator in node.decorator_list)
    return is_property and node.returns is not None and bool(_names(node.returns) & configs)


def _read_flags(node: ast.ClassDef, facts: FileFacts) -> None:
    """Read the class variables of type bool, and the group, that a class sets."""
    for item in node.body:
        match item:
            case ast.AnnAssign(target=ast.Name(id="group"), value=ast.Constant(value=str(group))):
                facts.groups.add(group)
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.Constant()) if (
                ast.unparse(item.annotation) == "ClassVar[bool]"
            ):
                facts.flags.append((name, item.lineno, node.name))
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Constant(value=bool())):
                facts.flags.append((name, item.lineno, node.name))


def _names(node: ast.expr) -> frozenset[str]:
    """Return the names in an annotation, those in quotes included."""
    found = set()
    for inner in ast.walk(node):
        match inner:
            case ast.Name(id=name) | ast.Attribute(attr=name):
                found.add(name)
            case ast.Constant(value=str(text)):
                found.update(re.findall(r"[A-Za-z_]\w*", text))
    return frozenset(found)


def _eager_imports(body: Iterable[ast.stmt]) -> Iterator[str]:
    """Yield the dotted names of the package that are imported when the module is."""
    for node in body:
        match node:
            case ast.ImportFrom(module=str(module)) if module.split(".")[0] == PACKAGE:
                yield from (f"{module}.{alias.name}" for alias in node.names)
            case ast.Import():
                yield from (alias.name for alias in node.names if alias.name.split(".")[0] == PACKAGE)
            case ast.If() if "TYPE_CHECKING" not in ast.unparse(node.test):
                yield from _eager_imports((*node.body, *node.orelse))
            case ast.Try():
                yield from _eager_imports((*node.body, *(s for h in node.handlers for s in h.body), *node.orelse))
            case ast.ClassDef():
                yield from _eager_imports(node.body)


def closure(files: Mapping[str, FileFacts], start: str) -> set[str]:
    """Return the files that the import of a file runs, the __init__ of its folders included."""
    found: set[str] = set()
    waiting = [start] if start in files else []
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        found.add(name)
        waiting += [target for dotted in files[name].imported for target in _files_of(dotted, files)]
    return found


def _files_of(dotted: str, files: Mapping[str, FileFacts]) -> Iterator[str]:
    parts = dotted.split(".")[1:]
    for end in range(len(parts) + 1):
        inner = "/".join(parts[:end])
        yield from (name for name in (f"{inner}.py", f"{inner}/__init__.py".lstrip("/")) if name in files)


def count_all(root: Path) -> dict[str, Places]:
    """Return the places of every count in a checkout."""
    package = root / "src" / PACKAGE
    files = {facts.name: facts for facts in (read_file(path, package) for path in sorted(package.rglob("*.py")))}
    found: dict[str, Places] = {count.name: [] for count in COUNTS}
    for facts in files.values():
        for name, places in facts.places.items():
            found[name] += places
    _count_across(files, found)
    found["flags_of_one_kind"] = list(_flags_of_one_kind(files.values()))
    found["that_of"] = list(_that_of(root))
    found["tests"] = list(_tests(root))
    return found


def _count_across(files: Mapping[str, FileFacts], found: dict[str, Places]) -> None:
    """Add the counts that need every file."""
    configs = {"Config"}.union(*(facts.aliases for facts in files.values()))
    holders = set().union(*(facts.holders for facts in files.values())) - configs
    predicates = set().union(*(facts.predicates for facts in files.values()))
    homes = defaultdict(list)
    trainer = closure(files, "train/trainer.py")
    part_classes = {
        name: facts.name for facts in files.values() if facts.name.startswith(PART_CLASSES) for name in facts.classes
    }
    for facts in files.values():
        for names, line, text in facts.type_tests if facts.name not in PART_LOADERS else ():
            places = {part_classes[name] for name in names & part_classes.keys()}
            if places and _home(facts.name) not in map(_home, places):
                found["part_type_tests"].append(Place(facts.name, f"{facts.name}:{line}: {text}"))
        for names, line, text in facts.parameters:
            if names & configs:
                found["config_parameters"].append(Place(facts.name, f"{facts.name}:{line}: {text}"))
            elif names & holders:
                found["holder_parameters"].append(Place(facts.name, f"{facts.name}:{line}: {text}"))
        for name, line in facts.reads:
            if name in predicates:
                found["predicate_reads"].append(Place(facts.name, f"{facts.name}:{line}: {name}"))
        for name, line in facts.classes.items():
            homes[name].append(f"{facts.name}:{line}")
        lines = [Place(facts.name.split("/")[0], facts.name)] * facts.lines
        found["package_lines"] += lines
        found["package_files"] += lines[:1]
        found["core_lines"] += [] if facts.name.split("/")[0].removesuffix(".py") in PRODUCT else lines
        found["trainer_lines"] += lines if facts.name in trainer else []
        found["trainer_modules"] += lines[:1] if facts.name in trainer else []
    found["class_names_twice"] = [
        Place(name, f"{name}: {', '.join(places)}") for name, places in homes.items() if len(places) > 1
    ]


def _flags_of_one_kind(files: Iterable[FileFacts]) -> Iterator[Place]:
    bases: dict[str, list[tuple[FileFacts, int]]] = defaultdict(list)
    kinds: dict[tuple[str, str], set[str]] = defaultdict(set)
    readers: dict[str, set[str]] = defaultdict(set)
    for facts in files:
        is_kind = facts.name.startswith("parts/")
        for name, line, owner in facts.flags:
            if is_kind:
                group = facts.name.split("/")[1].removesuffix(".py")
                kinds[group, name].add(_home(facts.name) if facts.name.count("/") > 1 else f"{facts.name}: {owner}")
            else:
                bases[name].append((facts, line))
        for name, _ in () if is_kind else facts.reads:
            readers[name].add(facts.name)
    for name, declared in bases.items():
        for facts, line in declared:
            setters = {home for group in facts.groups for home in kinds[group, name]}
            # A base class of several kinds that sets it does not have a group.
            setters |= {other.name for other, at in declared if not other.groups or (other is facts and at != line)}
            read = sorted(readers[name] - {facts.name})
            if len(setters) == 1 and min(setters).startswith("parts/") and read:
                where = f"{facts.name}:{line}: {name}, of {min(setters)}, read in {', '.join(read)}"
                yield Place(facts.name, where)


def _home(name: str) -> str:
    """Return the folder of a part in `parts/GROUP/KIND/`, or else the file."""
    return name.rpartition("/")[0] if name.startswith("parts/") and name.count("/") == 3 else name


def _that_of(root: Path) -> Iterator[Place]:
    """Yield the places by folder: of the package by its own folders, else the folder at the top."""
    pages = [page for page in (*root.glob("*.md"), *(root / "docs").rglob("*.md")) if page.name != "log.md"]
    code = [path for folder in TEXT_FOLDERS for path in sorted((root / folder).rglob("*.py"))]
    for path in (*code, *sorted(pages)):
        text = path.read_text()
        name = path.relative_to(root)
        folder = "/".join(name.parts[: 3 if name.parts[0] == "src" else 1])
        for found in THAT_OF.finditer(text):
            yield Place(folder, f"{name.as_posix()}:{text.count(chr(10), 0, found.start()) + 1}")


def _tests(root: Path) -> Iterator[Place]:
    for path in sorted((root / "tests").rglob("test_*.py")):
        name = path.relative_to(root / "tests")
        yield from [Place(name.parts[0], name.as_posix())] * len(TEST.findall(path.read_text()))


Numbers = dict[str, dict[str, int]]


def numbers_of(found: Mapping[str, Places]) -> Numbers:
    """Return the number of places by group for each count."""
    return {name: dict(sorted(Counter(place.group for place in places).items())) for name, places in found.items()}


def risen(found: Mapping[str, Places], baseline: Numbers) -> dict[str, Places]:
    """Return the counts above the baseline, with their places in the groups that have more than before."""
    new = {}
    for name, numbers in numbers_of(found).items():
        before = baseline.get(name, {})
        if BY_NAME[name].may_rise or sum(numbers.values()) <= sum(before.values()):
            continue
        groups = {group for group, number in numbers.items() if number > before.get(group, 0)}
        new[name] = [place for place in found[name] if place.group in groups]
    return new


def lowered(found: Mapping[str, Places], baseline: Numbers, accepted: Iterable[str] = ()) -> Numbers:
    """Return the next baseline: the present numbers; counts that have risen keep their baseline.

    Args:
        found: the present places.
        baseline: the stored numbers.
        accepted: counts that may rise this time.
    """
    kept = set(risen(found, baseline)) - set(accepted)
    return {name: baseline[name] if name in kept else numbers for name, numbers in numbers_of(found).items()}


def as_text(numbers: Numbers) -> str:
    """Return the text of house.json: a line for each count, so that git can merge changes of two counts."""
    lines = [f"{json.dumps(name)}: {json.dumps(groups)}" for name, groups in numbers.items()]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def table(found: Mapping[str, Places], baseline: Numbers) -> str:
    """Return the present counts with the baseline and the goals."""
    rows = [f"{'count':24}{'now':>9}{'baseline':>10}  goal"]
    for count in COUNTS:
        before = sum(baseline.get(count.name, {}).values())
        rows.append(f"{count.name:24}{len(found[count.name]):9,}{before:10,}  {count.goal}")
    return "\n".join(rows)


def report_of(new: Mapping[str, Places], shown: int = 40) -> Iterator[str]:
    """Yield a line for each count that has risen, with the places of the files where it has."""
    for name, places in new.items():
        yield f"{name} has risen: {BY_NAME[name].definition}; places in the files that have more than before:"
        yield from (f"  {place}" for place in places[:shown])
        if len(places) > shown:
            yield f"  and {len(places) - shown} more: python tools/house.py --places {name}"


def main(argv: list[str] | None = None, out: Callable[[str], object] = print) -> int:
    """Print the counts; return 1 if one has risen, else 0."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.add_argument("--root", type=Path, default=ROOT, help="the checkout to count (default: this one)")
    parser.add_argument("--baseline", type=Path, default=BASELINE, help="stored numbers (default: tools/house.json)")
    parser.add_argument("--places", choices=sorted(BY_NAME), metavar="COUNT", help="print a definition and its places")
    parser.add_argument("--write", action="store_true", help="store the counts that have fallen")
    parser.add_argument(
        "--accept", action="append", default=[], choices=sorted(BY_NAME), metavar="COUNT", help="store a risen one too"
    )
    args = parser.parse_args(argv)
    if args.accept and not args.write:
        parser.error("--accept stores a count that has risen: add --write")
    found = count_all(args.root)
    baseline: Numbers = json.loads(args.baseline.read_text()) if args.baseline.exists() else {}
    if args.places:
        out(BY_NAME[args.places].definition)
        out("\n".join(dict.fromkeys(map(str, found[args.places]))))
        return 0
    if args.write:
        accepted = args.accept if baseline else list(BY_NAME)
        baseline = lowered(found, baseline, accepted)
        args.baseline.write_text(as_text(baseline))
    out(table(found, baseline))
    new = risen(found, baseline)
    for line in report_of(new):
        out(line)
    return bool(new)


if __name__ == "__main__":
    sys.exit(main())
