"""Pipeline schedules as CSV files: one row per pipeline rank, one cell per action.

A cell is `<stage><action><micro-batch>`, both counted from 0: `2F0` forward, `2B0` whole backward, or instead of it
`2I0`, the input gradients, and later `2W0`, the weight gradients. Empty cells are ignored: a rank starts the next
action as soon as its inputs are available. It is the compute-only form of `torch.distributed.pipelining`, whose
`(2F0;1B0)OVERLAP_F_B` is read as its parts in order.
"""

import csv
import io
import re
from collections.abc import Sequence
from pathlib import Path

from moefold.bounded_read import MAX_SCHEDULE_BYTES, read_bytes
from moefold.config.base.pipeline_actions import Action, SlotRow, find_problem, one_per_slot
from moefold.config.groups.schedule import SchedulePart
from moefold.errors import ConfigError
from moefold.message_text import Setting

CELL = re.compile(r"(\d{1,6})([FBIW])(\d{1,6})")
OVERLAP = re.compile(r"\(([^()]*)\)OVERLAP_F_B")
EXAMPLE = "such as 0F0, 1B0, 1I0 or 1W0"

Row = tuple[Action, ...]


def read_schedule(
    path: str, pp: int, virtual_stages: int, num_micro_batches: int | None = None
) -> tuple[tuple[SlotRow, ...], tuple[int, ...]]:
    """Read the rows and the rank of each stage, and check that they are complete and free of deadlocks.

    Args:
        num_micro_batches: the number that the file must have, or None for any.

    Raises:
        ConfigError: the file cannot be read, a cell is wrong, an action is missing or doubled, or ranks would deadlock.
    """
    name = f"{SchedulePart.key}.path={path!r}"
    rows = _read(name, path)
    if len(rows) != pp:
        raise ConfigError(
            f"{name} has {len(rows)} rows, and {Setting('parallel.pp', pp)}; write one row for each pipeline rank"
        )
    ranks = _stage_ranks(name, rows, pp, virtual_stages)
    num_listed = 1 + max(action.micro_batch for row in rows for action in row)
    count = num_listed if num_micro_batches is None else num_micro_batches
    if num_listed != count:
        raise ConfigError(
            f"{name} is for {num_listed} micro-batches, and the batch gives each data-parallel rank {count}; "
            "choose train.global_batch_size = micro_batch_size*dp times as many, or another file"
        )
    slots = tuple(map(one_per_slot, rows))
    if fault := find_problem(slots, ranks, count):
        raise ConfigError(name + fault)
    return slots, ranks


def _read(name: str, path: str) -> tuple[Row, ...]:
    try:
        text = read_bytes(Path(path), MAX_SCHEDULE_BYTES).decode("utf-8")
        cells = [row for row in csv.reader(io.StringIO(text, newline="")) if any(cell.strip() for cell in row)]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not a CSV file"
        raise ConfigError(f"{name} cannot be read: {reason}; docs/pipeline.md describes such a file") from None
    return tuple(
        tuple(action for column, cell in enumerate(row) for action in _parse_cell(name, cell.strip(), rank, column))
        for rank, row in enumerate(cells)
    )


def _parse_cell(name: str, cell: str, rank: int, column: int) -> Row:
    parts = [cell] if cell else []
    if overlap := OVERLAP.fullmatch(cell):
        parts = overlap.group(1).split(";")
    actions = []
    for part in parts:
        match = CELL.fullmatch(part.strip())
        if match is None:
            raise ConfigError(
                f"{name}, row {rank + 1}, cell {column + 1}: {cell!r} is not an action; write one {EXAMPLE}"
            )
        actions.append(Action(int(match.group(1)), match.group(2), int(match.group(3))))
    return tuple(actions)


def _stage_ranks(name: str, rows: Sequence[Row], pp: int, virtual_stages: int) -> tuple[int, ...]:
    rank_of_stage: dict[int, int] = {}
    for rank, row in enumerate(rows):
        for action in row:
            if rank_of_stage.setdefault(action.stage, rank) != rank:
                raise ConfigError(
                    f"{name}: stage {action.stage} is on row {rank_of_stage[action.stage] + 1} and, with {action}, on "
                    f"row {rank + 1}; a stage has one rank"
                )
    if sorted(rank_of_stage) != list(range(pp * virtual_stages)):
        raise ConfigError(
            f"{name} has the stages {sorted(rank_of_stage)}, and "
            f"{Setting('parallel.pp')}*parallel.virtual_stages={pp * virtual_stages} makes 0 to "
            f"{pp * virtual_stages - 1}; set virtual_stages, or correct the file"
        )
    counts = [list(rank_of_stage.values()).count(rank) for rank in range(pp)]
    if counts != [virtual_stages] * pp:
        raise ConfigError(
            f"{name} gives the ranks {counts} stages; each must have parallel.virtual_stages={virtual_stages}"
        )
    return tuple(rank_of_stage[stage] for stage in sorted(rank_of_stage))
