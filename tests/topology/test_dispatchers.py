"""The registry of dispatchers agrees with the recipe's schema and with the builders, and no module compares names."""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest

import moefold
from moefold.config.suggestions import key_types
from moefold.model.moe.dispatch.registry import BUILDERS
from moefold.topology.dispatchers import DISPATCHERS
from moefold.validate.moe import UNSUPPORTED_REASONS

SOURCE = Path(moefold.__file__).parent


def test_names_agree() -> None:
    """Check the schema's names, the builders and the rules of kernel packages against the registry."""
    runs = {name for name, spec in DISPATCHERS.items() if spec.runs}
    assert runs == set(get_args(key_types("parallel")["dispatcher"]))
    spread = {name for name in runs if DISPATCHERS[name].spreads_experts and not DISPATCHERS[name].prefers}
    assert spread == set(BUILDERS)
    assert {name for name, spec in DISPATCHERS.items() if spec.kernel_package} == set(UNSUPPORTED_REASONS)
    for spec in DISPATCHERS.values():
        assert {spec.prefers, spec.falls_back_to, spec.priced_as, spec.written_as} - {""} <= set(DISPATCHERS)


@pytest.mark.parametrize(
    ("name", "ep", "etp", "collectives"),
    [
        ("alltoall", 2, 1, ("dispatch over ep", "combine over ep")),
        ("alltoall", 2, 2, ("dispatch over ep", "dispatch over etp", "combine over etp", "combine over ep")),
        ("leastloaded", 1, 2, ("dispatch over etp", "combine over etp")),
        ("allgather", 2, 2, ("dispatch over ep x etp", "combine over ep x etp")),
        ("alltoall", 1, 1, ()),
    ],
)
def test_collectives(name: str, ep: int, etp: int, collectives: tuple[str, ...]) -> None:
    """Compare the collectives of a layer with those written out."""
    assert DISPATCHERS[name].collectives(ep, etp) == collectives


def test_no_module_compares_names_of_dispatchers() -> None:
    """Check that only the registry knows dispatchers by name; a branch on a name would bypass a new record."""
    assert list(_name_comparisons()) == []


def _name_comparisons() -> Iterator[str]:
    for path in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Compare) and "dispatcher" in ast.unparse(node.left):
                literals = {
                    part.value
                    for side in node.comparators
                    for part in ast.walk(side)
                    if isinstance(part, ast.Constant) and isinstance(part.value, str)
                }
                if literals & set(DISPATCHERS):
                    yield f"{path.relative_to(SOURCE)}:{node.lineno} {ast.unparse(node)}"
