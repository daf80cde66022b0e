"""Rows of the pipeline schedule of a recipe or of a mapping."""

from dataclasses import fields
from functools import cache, lru_cache

from moefold.config.base.part import Part, describe_part
from moefold.config.base.part_registry import built_in_kinds, find_part, is_built_in
from moefold.config.base.pipeline_actions import SlotRow, find_problem, find_undeclared, split_pairs
from moefold.config.chosen import as_part, chosen_in
from moefold.config.groups.schedule import SchedulePart
from moefold.config.model import ModelConfig
from moefold.config.sections.parallel import ParallelConfig
from moefold.config.sections.train import TrainConfig
from moefold.errors import ConfigError

DEFAULT_SCHEDULE: str = next(str(key.default) for key in fields(ParallelConfig) if key.name == "schedule")
"""Default schedule of a recipe."""


@cache
def schedule_named(schedule: str | Part) -> SchedulePart:
    """Return the schedule of a mapping of the planner: by name, without settings such as a file, or as a part."""
    return as_part(find_part(SchedulePart.group, schedule)() if isinstance(schedule, str) else schedule, SchedulePart)


@cache
def overlapped_schedules() -> tuple[str, ...]:
    """Return the built-in schedules that `parallel.overlap_experts` may use."""
    return tuple(
        kind for kind in built_in_kinds(SchedulePart.group) if find_part(SchedulePart.group, kind).pairs_passes()
    )


@lru_cache(maxsize=16384)
def schedule_row(
    schedule: str | Part, rank: int, pp: int, virtual_stages: int, num_micro_batches: int, *, overlap: bool = False
) -> SlotRow:
    """Return the slots of one pipeline rank. With pp=1, micro-batches follow each other under every schedule.

    Args:
        schedule: as in `schedule_named`.
        num_micro_batches: a number that the schedule accepts.
        overlap: whether the slots are for `overlap_experts`.
    """
    part = schedule_named(schedule if pp > 1 else DEFAULT_SCHEDULE)
    row = part.overlapped_row if overlap else part.row
    return row(rank, pp, virtual_stages, num_micro_batches)


def schedule_rows(
    schedule: str | Part, pp: int, virtual_stages: int, num_micro_batches: int, *, overlap: bool = False
) -> tuple[SlotRow, ...]:
    """Return the slots of every pipeline rank. See `schedule_row`.

    Raises:
        ConfigError: the schedule file cannot be read or is wrong, or a schedule of another package has wrong rows.
    """
    part = schedule_named(schedule if pp > 1 else DEFAULT_SCHEDULE)
    rows = part.rows(pp, virtual_stages, num_micro_batches, overlap=overlap)
    if not is_built_in(type(part)) and (fault := _problem_of(part, rows, pp, virtual_stages, num_micro_batches)):
        raise ConfigError(f"{describe_part(part)}{fault}")
    return rows


@lru_cache(maxsize=16384)
def _problem_of(schedule: SchedulePart, rows: tuple[SlotRow, ...], pp: int, virtual_stages: int, count: int) -> str:
    """Return the error in the rows of a schedule, as it follows its name in a message, or "" without an error."""
    ranks = schedule.stage_ranks(pp, virtual_stages)
    return find_problem(rows, ranks, count) or find_undeclared(rows, splits_backward=schedule.splits_backward)


def runtime_slots(model: ModelConfig, parallel: ParallelConfig, train: TrainConfig) -> tuple[SlotRow, ...]:
    """Return the slots of each pipeline rank in a step, as the runtime executes them.

    Raises:
        ConfigError: the schedule file cannot be read.
    """
    p = parallel
    return schedule_rows(
        chosen_in(p, SchedulePart),
        p.pp,
        p.virtual_stages,
        train.num_micro_batches(p.dp),
        overlap=overlaps_micro_batches(model, p),
    )


def schedule_slots(model: ModelConfig, parallel: ParallelConfig, train: TrainConfig) -> tuple[SlotRow, ...]:
    """Return `runtime_slots` for counting memory: only with overlap are two micro-batches in one slot.

    Raises:
        ConfigError: the schedule file cannot be read.
    """
    rows = runtime_slots(model, parallel, train)
    return rows if overlaps_micro_batches(model, parallel) else tuple(map(split_pairs, rows))


def overlaps_micro_batches(model: ModelConfig, parallel: ParallelConfig) -> bool:
    """Return whether the passes of a pair overlap: `parallel.overlap_experts` of a model with experts."""
    return parallel.overlap_experts and model.has_moe_layers


def stage_ranks(p: ParallelConfig) -> tuple[int, ...]:
    """Return the pipeline rank of each stage, in model order.

    Raises:
        ConfigError: the schedule file cannot be read.
    """
    return chosen_in(p, SchedulePart).stage_ranks(p.pp, p.virtual_stages)
