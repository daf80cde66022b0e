"""The registry of optimizers agrees with the recipe's schema and with the builders, and no module compares names."""

import ast
from pathlib import Path
from typing import get_args

import moefold
from moefold.config.suggestions import key_types
from moefold.cost.optimizers import OPTIMIZERS
from moefold.optim.registry import BUILDERS

SOURCE = Path(moefold.__file__).parent
ORACLE = "verify/oracle_optimizer.py"
"""Shares no line with the trainer."""


def test_names_agree() -> None:
    """Check the schema's names and the builders against the registry."""
    assert set(OPTIMIZERS) == set(get_args(key_types("train")["optimizer"])) == set(BUILDERS)


def test_no_module_compares_names_of_optimizers() -> None:
    """Check that only the registry knows optimizers by name; a branch on a name would bypass a new record."""
    found = [
        f"{path.relative_to(SOURCE)}:{node.lineno} {ast.unparse(node)}"
        for path in sorted(SOURCE.rglob("*.py"))
        if path.relative_to(SOURCE).as_posix() != ORACLE
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Compare)
        and "optimizer" in ast.unparse(node.left)
        and any(
            isinstance(side, ast.Constant) and isinstance(side.value, str) and side.value in OPTIMIZERS
            for side in node.comparators
        )
    ]
    assert found == []
