"""Test that no file, function, signature or class exceeds its budget, and that the counters find one that does."""

import ast
import textwrap

import pytest

from tests.architecture import rules

LIMITS = {"file_lines": 40, "function_lines": 6, "parameters": 3, "nesting": 2, "class_members": 2}


@pytest.fixture
def exceeded(tmp_path):
    """Writes a snippet and returns (place, rule, value) of each budget that it exceeds."""

    def check(snippet: str) -> list[tuple[str, str, int]]:
        path = tmp_path / "snippet.py"
        path.write_text(textwrap.dedent(snippet))
        found = rules.exceeded_budgets(path, LIMITS, tmp_path)
        return [(finding.where.removeprefix("snippet.py"), finding.rule, finding.value) for finding in found]

    return check


def test_budgets_of_the_code():
    limits = rules.settings()
    files = rules.python_files(rules.SOURCE, rules.TESTS, rules.ROOT / "tools")
    assert files
    found = [finding for path in files for finding in rules.exceeded_budgets(path, limits)]
    assert rules.unexcused(found, limits["exceptions"]) == []


def test_the_budgets_equal_the_house():
    limits = rules.settings()
    limits.pop("exceptions")
    assert limits == {"file_lines": 800, "function_lines": 80, "parameters": 8, "nesting": 4, "class_members": 25}


def test_a_long_file_is_found(exceeded):
    assert exceeded("x = 1\n" * 40) == []
    assert exceeded("x = 1\n" * 41) == [("", "file_lines", 41)]


def test_a_long_function_is_found_and_its_decorator_is_free(exceeded):
    body = "    x = 1\n"
    assert exceeded("@cache\ndef f():\n" + 5 * body) == []
    assert exceeded("async def f():\n" + 6 * body) == [("::f", "function_lines", 7)]


@pytest.mark.parametrize(
    ("signature", "count"),
    [
        ("def f(a, b, c): ...", 3),
        ("def f(self, a, b, c): ...", 3),
        ("def f(a, b, /, c, d): ...", 4),
        ("def f(a, *, b, c, d): ...", 4),
        ("def f(a, b, *rest, **names): ...", 4),
        ("def f(cls, a, b, c, d): ...", 4),
    ],
)
def test_parameters_are_counted_without_the_receiver(exceeded, signature, count):
    assert exceeded(signature) == ([("::f", "parameters", 4)] if count == 4 else [])


@pytest.mark.parametrize(
    ("snippet", "depth"),
    [
        ("def f():\n for a in b:\n  if a: pass", 2),
        ("def f():\n if a: pass\n elif b:\n  if c: pass\n else: pass", 2),
        ("def f():\n for a in b:\n  if a:\n   while b: pass", 3),
        ("def f():\n with a:\n  try: pass\n  except E:\n   if b: pass", 3),
        ("def f():\n if a: pass\n else:\n  x = 1\n  for b in c:\n   if d: pass", 3),
        ("def f():\n match a:\n  case 1:\n   for b in c:\n    if d: pass", 3),
        ("def f():\n if a: pass\n elif b:\n  for c in d:\n   if e: pass", 3),
    ],
)
def test_nesting_counts_blocks_but_no_elif(exceeded, snippet, depth):
    assert exceeded(snippet) == ([("::f", "nesting", 3)] if depth == 3 else [])


def test_public_members_are_counted_and_inner_definitions_are_named(exceeded):
    snippet = """
    class C:
        x: int
        y: int
        def a(self): ...
        def b(self): ...
        def _c(self): ...
        def d(self):
            def inner(p, q, r, s): ...
    """
    assert exceeded(snippet) == [("::C", "class_members", 3), ("::C.d.inner", "parameters", 4)]


def test_an_exception_covers_up_to_its_limit_needs_a_reason_and_must_be_needed():
    finding = rules.Exceeded("a.py::f", "function_lines", 90, 80)
    exception = {"where": "a.py::f", "rule": "function_lines", "limit": 90, "reason": "one table"}
    assert rules.unexcused([finding], [exception]) == []
    assert rules.unexcused([finding], []) == ["a.py::f: function_lines is 90, at most 80"]
    assert rules.unexcused([finding], [exception | {"limit": 89}]) == ["a.py::f: function_lines is 90, at most 80"]
    assert rules.unexcused([finding], [exception | {"rule": "nesting"}]) == [
        "a.py::f: function_lines is 90, at most 80",
        "a.py::f: the exception for nesting is no longer needed",
    ]
    assert rules.unexcused([finding], [exception | {"reason": " "}]) == ["a.py::f: an exception needs a reason"]


def test_the_source_parses_as_the_oldest_supported_python():
    for path in rules.python_files(rules.SOURCE):
        ast.parse(path.read_text(), feature_version=(3, 11))
