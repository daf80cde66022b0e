"""Docstrings, comments and pages follow the rules of prose, and each rule finds a fault."""

import ast

import pytest

from tests.architecture import prose, rules
from tests.architecture.prose import CODE, PAGES


def test_docstrings_begin_with_a_sentence():
    assert [found for path in CODE for found in prose.headless(path)] == []


def test_no_word_of_the_list_is_used():
    assert [found for path in CODE for found in prose.words_to_avoid(path)] == []


def test_an_import_follows_each_comment_about_a_lazy_import():
    assert [found for path in CODE for found in prose.stray_lazy_comments(path)] == []


def test_names_of_tests_are_short():
    files = [path for folder in ("tests", "experiments/tests") for path in (rules.ROOT / folder).rglob("test_*.py")]
    names = [
        node.name
        for path in files
        for node in ast.walk(rules.tree_of(path))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    ]
    assert [name for name in names if len(name) > prose.MAX_TEST_NAME] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(rules.ROOT).as_posix())
def test_pages_are_plain(page):
    assert prose.words_of_page(page) == []


def test_cells_of_tables_are_short():
    pages = [page for page in PAGES if page.name not in prose.PAGES_WITH_LONG_CELLS]
    assert [found for page in pages for found in prose.long_cells(page)] == []


def test_few_lines_bind_several_names():
    found = [line for path in CODE for line in prose.packed_assignments(path)]
    assert len(found) <= prose.MAX_PACKED_ASSIGNMENTS, found


@pytest.mark.parametrize(
    ("text", "is_found"),
    [
        ('"""What a rank holds."""', True),
        ('"""Parts of a layer."""', False),
        ('def f():\n    """The sum of it."""', True),
        ('def f():\n    """Return the sum."""', False),
        ('class C:\n    """The state of a rank."""', False),
        ('class C:\n    @property\n    def p(self):\n        """The rank."""', False),
        ('class C:\n    """Whether it is so."""', True),
        ('class C:\n    x: bool\n    """Whether it is so."""', True),
        ('class C:\n    x: bool\n    """True if it is so."""', False),
        ('X = 1\n"""Where it is."""', True),
        ('class C:\n    @property\n    def p(self):\n        """Return whether it is so."""', True),
    ],
)
def test_headless_docstrings_are_found(tmp_path, text, is_found):
    path = tmp_path / "snippet.py"
    path.write_text(text)
    assert bool(prose.headless(path, tmp_path)) == is_found


@pytest.mark.parametrize(
    ("text", "is_found"),
    [
        ("x = 1  # it lies " + "beside y", True),
        ("x = 'made " + "again'", True),
        ("beside" + " = 1", False),
        ("x = 'recomputed'", False),
    ],
)
def test_words_are_found_in_prose_only(tmp_path, text, is_found):
    path = tmp_path / "snippet.py"
    path.write_text(text)
    assert bool(prose.words_to_avoid(path, tmp_path)) == is_found


@pytest.mark.parametrize(
    ("code", "is_found"),
    [
        ("import a\n", False),
        ("# in two lines\nif a:\n    from a import b\n", False),
        ("\na.b()\nimport c\n", True),
        ("", True),
    ],
)
def test_comments_without_their_lazy_import_are_found(tmp_path, code, is_found):
    path = tmp_path / "snippet.py"
    path.write_text(f"# Lazy import: a takes a second.\n{code}")
    assert bool(prose.stray_lazy_comments(path, tmp_path)) == is_found


def test_long_lines_of_pages_are_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("x" * 121 + "\n| " + "x" * 121 + " |\n[x](" + "x" * 121 + ")\n")
    assert prose.words_of_page(page, tmp_path) == ["page.md:1: 121 columns"]


@pytest.mark.parametrize(
    ("cell", "is_found"), [("x " * 71, True), ("[x](" + "x" * 141 + ")", False), ("x\\|" * 60, True)]
)
def test_long_cells_are_found(tmp_path, cell, is_found):
    page = tmp_path / "page.md"
    page.write_text(f"{'x ' * 90}\n\n| a | b |\n| --- | --- |\n| y | {cell} |\n")
    assert bool(prose.long_cells(page, tmp_path)) == is_found


@pytest.mark.parametrize(("text", "is_found"), [("a, b = 1, 2", True), ("a, b = f()", False), ("a, b = b, a", False)])
def test_packed_assignments_are_found(tmp_path, text, is_found):
    path = tmp_path / "snippet.py"
    path.write_text(text)
    assert bool(prose.packed_assignments(path, tmp_path)) == is_found
