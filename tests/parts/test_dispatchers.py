"""Dispatchers: kinds that stand for each other exist, collectives of a layer, and no module compares names."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import moefold
from moefold.config.base.part_registry import built_in_kinds, find_part
from moefold.config.groups.dispatcher import DispatcherPart

SOURCE = Path(moefold.__file__).parent
KINDS = built_in_kinds("dispatcher")


def test_kinds_that_stand_for_others_exist() -> None:
    """Check the kinds that a dispatcher names."""
    parts = [find_part("dispatcher", kind) for kind in KINDS]
    assert {kind for part in parts for kind in part.resolves_to or ()} <= set(KINDS)


@pytest.mark.parametrize("kind", KINDS)
def test_a_dispatcher_is_built_or_resolved(kind: str) -> None:
    """Check that each kind that a run does not resolve builds a dispatcher of its own."""
    part = find_part("dispatcher", kind)
    assert (part.build is DispatcherPart.build) == bool(part.resolves_to)


@pytest.mark.parametrize(
    ("name", "ep", "etp", "collectives"),
    [
        ("alltoall", 2, 1, ("dispatch over ep", "combine over ep")),
        ("alltoall", 2, 2, ("dispatch over ep", "dispatch over etp", "combine over etp", "combine over ep")),
        ("allgather", 2, 2, ("dispatch over ep x etp", "combine over ep x etp")),
        ("alltoall", 1, 1, ()),
    ],
)
def test_collectives(name: str, ep: int, etp: int, collectives: tuple[str, ...]) -> None:
    """Compare the collectives of a layer with those written out."""
    assert find_part("dispatcher", name)().collectives(ep, etp) == collectives


def test_no_module_compares_names_of_dispatchers() -> None:
    """Check that no module branches on the name of a dispatcher, which would bypass a new one."""
    assert list(_name_comparisons()) == []


def _name_comparisons() -> Iterator[str]:
    texts = {path: path.read_text() for path in sorted(SOURCE.rglob("*.py"))}
    for path in (path for path, text in texts.items() if "dispatcher" in text):
        for node in ast.walk(ast.parse(texts[path])):
            if isinstance(node, ast.Compare) and "dispatcher" in ast.unparse(node.left):
                literals = {
                    part.value
                    for side in node.comparators
                    for part in ast.walk(side)
                    if isinstance(part, ast.Constant) and isinstance(part.value, str)
                }
                if literals & set(KINDS):
                    yield f"{path.relative_to(SOURCE)}:{node.lineno} {ast.unparse(node)}"
