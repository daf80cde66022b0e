"""Docstrings and pages name arguments and attributes that exist."""

import pytest

from tests.architecture.prose import CODE, PAGES
from tests.architecture.stale_names import Classes, stale_arguments, stale_attributes


def test_documented_arguments_are_taken():
    assert [found for path in CODE for found in stale_arguments(path)] == []


def test_named_attributes_exist():
    classes = Classes(CODE)
    assert [found for path in (*CODE, *PAGES) for found in stale_attributes(path, classes)] == []


@pytest.mark.parametrize(
    ("text", "stale"),
    [
        ('def f(a):\n    """Do.\n\n    Args:\n        b: it.\n    """', ["snippet.py:1: f has no b"]),
        ('def f(a, *b):\n    """Do.\n\n    Args:\n        a, b: they.\n    """', []),
        ('class C:\n    """Do.\n\n    Args:\n        b: it.\n    """\n    def __init__(self, b): ...', []),
        ("class One:\n    x = 1\n# `One.x`, `Other.x`", []),
        ("class Base:\n    x = 1\nclass One(Base):\n    pass\n# `One.x()`", []),
        ("class One:\n    x = 1\n# `One.y`", ["snippet.py:3: `One.y`"]),
    ],
)
def test_stale_names_are_found(tmp_path, text, stale):
    path = tmp_path / "snippet.py"
    path.write_text(text)
    found = [*stale_arguments(path, tmp_path), *stale_attributes(path, Classes([path]), tmp_path)]
    assert found == stale
