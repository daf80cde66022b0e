"""Rows of the built-in schedules are complete, and closed forms equal their execution. Wrong rows are refused."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest

from moefold.config.base.part import make_part
from moefold.config.base.part_registry import built_in_kinds
from moefold.config.base.pipeline_actions import Action, SlotRow, find_deadlock, find_swapped
from moefold.config.groups.schedule import SchedulePart
from moefold.config.rule import apply_rule
from moefold.config.schema import Config
from moefold.config.sections.moe import MoEConfig
from moefold.config.sections.parallel import ParallelConfig
from moefold.config.sections.train import TrainConfig
from moefold.errors import ConfigError
from moefold.planner.cost_model.bubble import bubble_s, simulated_bubble_s
from moefold.topology.schedules import schedule_named, schedule_rows
from moefold.validate.pipeline import validate_micro_batch_count, validate_rows, validate_schedule

RANKS = (2, 3, 4, 7)
GENERATED = [name for name in built_in_kinds("schedule") if not schedule_named(name).is_for_one_mapping]


def _shapes(name: str) -> Iterator[tuple[int, int, int]]:
    """Yield legal numbers of pipeline ranks, stages per rank and micro-batches."""
    for pp in RANKS:
        for chunks in (1, 2, 3):
            parallel = ParallelConfig(world_size=pp, pp=pp, schedule=name, virtual_stages=chunks)
            for count in range(1, 3 * pp + 2):
                cfg = Config(parallel=parallel, train=TrainConfig(global_batch_size=count))
                if not [*validate_schedule(cfg.parallel), *validate_micro_batch_count(cfg.parallel, cfg.train)]:
                    yield pp, chunks, count


@pytest.mark.parametrize("name", GENERATED)
def test_rows_are_complete_and_end(name: str) -> None:
    """Check all actions of each stage on its rank, kinds of backward passes, deadlocks, and the order of the stages."""
    spec = schedule_named(name)
    for pp, chunks, count in _shapes(name):
        for overlap in (False, True) if spec.pairs_passes() else (False,):
            rows = schedule_rows(name, pp, chunks, count, overlap=overlap)
            assert find_deadlock(rows) is None, (pp, chunks, count, overlap)
            assert find_swapped(rows) is None, (pp, chunks, count, overlap)
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


@pytest.mark.parametrize("name", GENERATED)
def test_closed_forms_equal_the_execution_of_the_rows(name: str) -> None:
    """Compare the idle time where forward, input gradients and weight gradients take equally long."""
    compared = 0
    for pp, chunks, count in _shapes(name):
        if count < 2 * pp - 1:
            continue
        times = (2.0 * chunks, 4.0 * chunks, 2.0 * chunks)
        formula = bubble_s(*times, pp=pp, vpp=chunks, num_micro_batches=count, schedule=name)
        assert schedule_named(name).bubble_s(*times, pp, chunks, count) is not None
        executed = simulated_bubble_s(name, *times, pp, chunks, count)
        assert formula == pytest.approx(executed, rel=1e-12, abs=1e-9), (pp, chunks, count)
        compared += 1
    assert compared >= 2 * len(RANKS)


@dataclass(frozen=True, kw_only=True)
class WrittenRows(SchedulePart):
    """Rows of two ranks with two micro-batches, written as in a schedule file; `+` joins the actions of a slot."""

    text: str

    def row(self, rank: int, pp: int, num_stages: int, count: int) -> SlotRow:
        slots = self.text.split("/")[rank].split()
        return tuple(tuple(Action(int(a[0]), a[1], int(a[2])) for a in slot.split("+")) for slot in slots)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("0F0 0F1 0B0 0B1/1F0 1B0 1F1", ": stage 1 does F with micro-batch 1; it must do F and B, or F, I and W"),
        ("0F0 0F1 0B0 0B1/1F0 1B0", ": stage 1 does nothing with micro-batch 1; it must do F and B, or F, I and W"),
        ("0B0 0F0 0F1 0B1/1F0 1B0 1F1 1B1", " deadlocks: rank 0 waits before 0B0, because its input comes later"),
        ("0F0 0B0 0F1 0B1/1F1 1B1 1F0 1B0", " deadlocks: rank 0 waits before 0B0, because its input comes later"),
        ("0F0 0F0 0B0 0B1/1F0 1B0 1F1 1B1", ": 0F0 occurs twice; leave one out"),
        ("0F0 0F1 1B0 0B1/1F0 1B0 1F1 1B1", ": rank 0 has 1B0, and the stages [0]"),
        ("0F0 0F1 0F2 0B0 0B1 0B2/1F0 1B0 1F1 1B1 1F2 1B2", ": stage 0 has micro-batch 2, and there are 2"),
        ("0F0 0F1 0I0 0W0 0I1 0W1/1F0 1B0 1F1 1B1", " has W actions, and splits_backward=False; set it to True"),
        ("0F0+0F1 0B0 0B1/1F0 1B0 1F1 1B1", " has 0F0, 0F1 in one slot; a slot is one action, or F and then B"),
        ("0F0 0F1 0B0 0B1/1F0 1B0 1F1 1B1", ""),
    ],
)
def test_wrong_rows_of_another_package_are_refused_by_name(text: str, fault: str) -> None:
    parallel = ParallelConfig(world_size=2, pp=2, schedule=WrittenRows(text=text))
    found = list(map(str, apply_rule(validate_rows, Config(parallel=parallel, train=TrainConfig(global_batch_size=2)))))
    name = f"parallel.schedule='{__name__}:WrittenRows' (a program)"
    assert [message[: len(name + fault)] for message in found] == ([name + fault] if fault else [])
    if fault:
        with pytest.raises(ConfigError, match="WrittenRows"):
            bubble_s(1.0, 2.0, 1.0, pp=2, vpp=1, num_micro_batches=2, schedule=parallel.schedule)


@pytest.mark.parametrize("kind", ["global_batch", "last_global_batch", "sequence"])
def test_swapped_micro_batches_are_refused_where_each_counts_those_before_it(kind: str) -> None:
    swapped = WrittenRows(text="0F0 0F1 0B1 0B0/1F1 1B1 1F0 1B0")
    cfg = Config(
        parallel=ParallelConfig(world_size=2, pp=2, schedule=swapped),
        train=TrainConfig(global_batch_size=2),
        moe=MoEConfig(aux_loss=0.01, aux_kind=make_part("balance_scope", kind)),
    )
    fault = (
        f"parallel.schedule='{__name__}:WrittenRows' (a program) runs 1F1 before 1F0, and moe.aux_kind='global_batch' "
        "counts the tokens of the micro-batches before each one; order the forward passes of a stage by micro-batch, "
        "or choose aux_kind='micro_batch'"
    )
    assert list(map(str, apply_rule(validate_rows, cfg))) == ([fault] if kind == "global_batch" else [])
    without_loss = replace(cfg, moe=replace(cfg.moe, aux_loss=0.0))
    assert not list(apply_rule(validate_rows, without_loss))
