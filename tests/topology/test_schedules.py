"""The registry of schedules agrees with the recipe's schema, its rows are complete, and no module compares names."""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest

import moefold
from moefold.config.pipeline_action import SlotRow, find_deadlock
from moefold.config.schema import Config, ParallelConfig, TrainConfig
from moefold.config.suggestions import default_of, key_types
from moefold.planner.cost_model.bubble import CLOSED_FORMS, bubble_s, simulated_bubble_s
from moefold.topology.schedules import DEFAULT_SCHEDULE, SCHEDULES, schedule_rows
from moefold.validate.parallel import validate_micro_batch_count

SOURCE = Path(moefold.__file__).parent
RANKS = (2, 3, 4, 7)
GENERATED = [name for name, spec in SCHEDULES.items() if not spec.reads_file]


def _shapes(name: str) -> Iterator[tuple[int, int, int]]:
    """Yield legal numbers of pipeline ranks, stages per rank and micro-batches."""
    for pp in RANKS:
        for chunks in filter(SCHEDULES[name].allows_virtual_stages, (1, 2, 3)):
            parallel = ParallelConfig(world_size=pp, pp=pp, schedule=name, virtual_stages=chunks)
            for count in range(1, 3 * pp + 2):
                cfg = Config(parallel=parallel, train=TrainConfig(global_batch_size=count))
                if not list(validate_micro_batch_count(cfg)):
                    yield pp, chunks, count


def test_names_agree() -> None:
    """Check the schema's names and default, and the names in records, against the registry."""
    assert list(SCHEDULES) == list(get_args(key_types("parallel")["schedule"]))
    assert all(spec.name == name for name, spec in SCHEDULES.items())
    assert default_of("parallel", "schedule") == DEFAULT_SCHEDULE
    assert set(CLOSED_FORMS) <= set(SCHEDULES)
    for spec in SCHEDULES.values():
        assert {spec.with_fewer_micro_batches, spec.with_other_virtual_stages} - {""} <= set(SCHEDULES)


@pytest.mark.parametrize("name", GENERATED)
def test_rows_are_complete_and_end(name: str) -> None:
    """Check all actions of each stage on its rank, kinds of backward passes, and deadlocks."""
    spec = SCHEDULES[name]
    for pp, chunks, count in _shapes(name):
        for overlap in (False, True) if spec.overlapped_row else (False,):
            rows = schedule_rows(name, pp, chunks, count, overlap=overlap)
            assert find_deadlock(rows) is None, (pp, chunks, count, overlap)
            _assert_complete(rows, spec.stage_ranks(pp, chunks), count, splits=spec.splits_backward)


def _assert_complete(rows: tuple[SlotRow, ...], ranks: tuple[int, ...], count: int, *, splits: bool) -> None:
    kinds: dict[tuple[int, int], str] = {}
    for rank, row in enumerate(rows):
        for action in (action for slot in row for action in slot):
            assert ranks[action.stage] == rank
            key = (action.stage, action.micro_batch)
            kinds[key] = kinds.get(key, "") + action.kind
        assert all(len(slot) == 1 or [action.kind for action in slot] == ["F", "B"] for slot in row)
    assert set(kinds) == {(stage, i) for stage in range(len(ranks)) for i in range(count)}
    assert set(kinds.values()) <= ({"FB", "FIW"} if splits else {"FB"})


@pytest.mark.parametrize("name", [name for name in GENERATED if name in CLOSED_FORMS])
def test_closed_forms_equal_the_execution_of_the_rows(name: str) -> None:
    """Compare the idle time where forward, input gradients and weight gradients take equally long."""
    compared = 0
    for pp, chunks, count in _shapes(name):
        if count < 2 * pp - 1:
            continue
        times = (2.0 * chunks, 4.0 * chunks, 2.0 * chunks)
        formula = bubble_s(*times, pp=pp, vpp=chunks, num_micro_batches=count, schedule=name)
        executed = simulated_bubble_s(name, *times, pp, chunks, count)
        assert formula == pytest.approx(executed, rel=1e-12, abs=1e-9), (pp, chunks, count)
        compared += 1
    assert compared >= 2 * len(RANKS)


def test_no_module_compares_names_of_schedules() -> None:
    """Check that only the registry knows schedules by name; a branch on a name would bypass a new record."""
    assert list(_name_comparisons()) == []


def _name_comparisons() -> Iterator[str]:
    for path in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Compare) and "schedule" in ast.unparse(node):
                literals = {
                    part.value
                    for side in (node.left, *node.comparators)
                    for part in ast.walk(side)
                    if isinstance(part, ast.Constant) and isinstance(part.value, str)
                }
                if literals & set(SCHEDULES):
                    yield f"{path.relative_to(SOURCE)}:{node.lineno} {ast.unparse(node)}"
