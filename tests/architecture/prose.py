"""Rules of prose, read off docstrings, comments and pages: first words, words to avoid, packed assignments."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

from tests.architecture.rules import ROOT, SOURCE, name_of, python_files, tree_of

MAX_COLUMNS = 120
MAX_PACKED_ASSIGNMENTS = 60
MAX_CELL = 140
PAGES_WITH_LONG_CELLS = ("recipe.md", "commands.md", "metrics.md", "gpu.md", "CHANGELOG.md")
"""Generated pages, and a record."""
MAX_TEST_NAME = 76
# A docstring that begins so is a clause without a main verb, or needs a noun from elsewhere.
NO_FIRST_WORDS = re.compile(
    r"^(What|Whether|Of|As|Where|Who|Which|Why|How|So|Beside|Behind|Those|These|Theirs|Else|"
    r"Return (whether )?(it|its|them|they))\b"
)
# A function does something: its first line begins with a verb.
NO_FIRST_WORDS_OF_FUNCTIONS = re.compile(
    r"^(The|A|An|All|Every|Each|One|My|This|That|It|Its|For|In|Inside|Nothing|None|No|Seconds|Bytes|Tokens|Ranks)\b"
)
WORDS = re.compile(
    r"\b(beside|behind|made again|made anew|makes anew|nobody|for ever|anew|is to be|be it|so many|so much as|"
    r"goes? home|lives? in|travels?|is told|are told|further tokens?)\b",
    re.IGNORECASE,
)
PAGES = sorted(
    page
    for page in (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "skills").rglob("*.md"))
    if page.name != "log.md" and page.parent.name != "design"
)
"""Pages that describe the current state: the log and the design notes are records."""
CODE = python_files(SOURCE, ROOT / "benchmarks", ROOT / "tools")


def docstrings(path: Path) -> Iterator[tuple[int, ast.AST, str]]:
    """Yield line, node and text of each docstring of modules, classes and functions in a file."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield getattr(node, "lineno", 1), node, text


def field_docstrings(path: Path) -> Iterator[tuple[int, str]]:
    """Yield line and text of each string below a field or a constant."""
    for node in ast.walk(tree_of(path)):
        body = getattr(node, "body", None)
        for before, after in pairwise(body if isinstance(body, list) else []):
            value = after.value if isinstance(after, ast.Expr) else None
            if isinstance(before, ast.Assign | ast.AnnAssign) and isinstance(value, ast.Constant):
                yield after.lineno, str(value.value)


def headless(path: Path, root: Path = ROOT) -> list[str]:
    """Return the docstrings whose first line is not a sentence of the form that CONTRIBUTING.md asks for."""
    found = [
        f"{name_of(path, root)}:{line}: {text.split(chr(10))[0]}"
        for line, text in field_docstrings(path)
        if NO_FIRST_WORDS.match(text)
    ]
    for line, node, text in docstrings(path):
        first = text.split("\n")[0]
        is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not _is_property(node)
        if NO_FIRST_WORDS.match(first) or (is_function and NO_FIRST_WORDS_OF_FUNCTIONS.match(first)):
            found.append(f"{name_of(path, root)}:{line}: {first}")
    return found


def words_to_avoid(path: Path, root: Path = ROOT) -> list[str]:
    """Return the lines of a Python file whose comments or strings hold a word of the list."""
    found = []
    for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
        if token.type in (tokenize.COMMENT, tokenize.STRING) or tokenize.tok_name[token.type] == "FSTRING_MIDDLE":
            for number, line in enumerate(token.string.split("\n"), token.start[0]):
                found += [f"{name_of(path, root)}:{number}: {match.group()}" for match in WORDS.finditer(line)]
    return found


def stray_lazy_comments(path: Path, root: Path = ROOT) -> list[str]:
    """Return the comments about a lazy import that no import follows, immediately or as the first line of a block."""
    lines = path.read_text().splitlines()
    found = []
    for number, line in enumerate(lines, 1):
        if re.match(r"\s*#.*\blazy import", line, re.IGNORECASE):
            code = [after for after in lines[number:] if not after.lstrip().startswith("#")][:2]
            if not any(re.match(r"\s*(import|from) ", after) for after in code):
                found.append(f"{name_of(path, root)}:{number}: {line.strip()}")
    return found


def words_of_page(path: Path, root: Path = ROOT) -> list[str]:
    """Return the lines of a page that hold a word of the list or are too long, except tables and links."""
    found = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        found += [f"{name_of(path, root)}:{number}: {match.group()}" for match in WORDS.finditer(line)]
        if len(line) > MAX_COLUMNS and not line.lstrip().startswith("|") and "](" not in line:
            found.append(f"{name_of(path, root)}:{number}: {len(line)} columns")
    return found


def long_cells(path: Path, root: Path = ROOT) -> list[str]:
    """Return the lines of a page with a cell of a table that should be a list or a paragraph, links by their text."""
    lines = path.read_text().splitlines()
    rows = [(number, line) for number, line in enumerate(lines, 1) if line.startswith("|")]
    return [
        f"{name_of(path, root)}:{number}: a cell of {len(cell)} characters"
        for number, line in rows
        for cell in re.split(r"(?<!\\)\|", re.sub(r"\]\([^)]*\)", "]", line))
        if len(cell.strip()) > MAX_CELL
    ]


def packed_assignments(path: Path, root: Path = ROOT) -> list[str]:
    """Return the lines that bind several names to several values, as in `a, b = x, y`; a swap is not one of them."""
    found = []
    for node in ast.walk(tree_of(path)):
        if (
            isinstance(node, ast.Assign)
            and isinstance(node.value, ast.Tuple)
            and isinstance(node.targets[0], ast.Tuple)
        ):
            names = {ast.unparse(target) for target in node.targets[0].elts}
            used = {
                ast.unparse(part) for value in node.value.elts for part in ast.walk(value) if isinstance(part, ast.expr)
            }
            if not names & used:
                found.append(f"{name_of(path, root)}:{node.lineno}")
    return found


def _is_property(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any("property" in ast.unparse(decorator) for decorator in node.decorator_list)
