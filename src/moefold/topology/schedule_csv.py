"""A pipeline schedule as a CSV file: one row for each pipeline rank, one cell for each action. Torch-free.

A cell is `<stage><action><micro-batch>`, both counted from 0: `2F0` forward, `2B0` whole backward, or in its place
`2I0`, the gradients of the input, and later `2W0`, those of the weights. Empty cells mean nothing: a rank does the next
thing as soon as it has what it needs. It is the compute-only form of `torch.distributed.pipelining`, whose
`(2F0;1B0)OVERLAP_F_B` stands for its parts in order.
"""

import csv
import io
import re
from collections.abc import Sequence
from pathlib import Path

from moefold.bounded_read import MAX_SCHEDULE_BYTES, read_bytes
from moefold.errors import ConfigError
from moefold.topology.pipeline_action import Action, ScheduleRow, ScheduleTable, find_deadlock, one_per_slot

CELL = re.compile(r"(\d{1,6})([FBIW])(\d{1,6})")
OVERLAP = re.compile(r"\(([^()]*)\)OVERLAP_F_B")
EXAMPLE = "such as 0F0, 1B0, 1I0 or 1W0"


def read_schedule(path: str, pp: int, virtual_stages: int, num_micro_batches: int | None = None) -> ScheduleTable:
    """Read and prove a schedule.

    Args:
        path: of the file.
        pp: pipeline ranks.
        virtual_stages: stages of each.
        num_micro_batches: how many there must be; None takes what the file has.

    Raises:
        ConfigError: the file cannot be read, a cell is wrong, work is missing or doubled, or ranks would wait for ever.
    """
    name = f"parallel.schedule_csv={path!r}"
    rows = _read(name, path)
    if len(rows) != pp:
        raise ConfigError(f"{name} has {len(rows)} rows, and parallel.pp={pp}; write one row for each pipeline rank")
    ranks = _stage_ranks(name, rows, pp, virtual_stages)
    found = 1 + max(action.micro_batch for row in rows for action in row)
    count = found if num_micro_batches is None else num_micro_batches
    if found != count:
        raise ConfigError(
            f"{name} is for {found} micro-batches, and the batch gives each data-parallel rank {count}; "
            "choose train.global_batch_size = micro_batch_size*dp times as many, or another file"
        )
    _check_complete(name, rows, len(ranks), count)
    if stuck := find_deadlock([one_per_slot(row) for row in rows]):
        rank, (waiting,) = stuck
        raise ConfigError(
            f"{name} never ends: rank {rank} waits for ever before {waiting}, because what it needs comes later; "
            "reorder the rows"
        )
    return ScheduleTable(rows, ranks)


def _read(name: str, path: str) -> tuple[ScheduleRow, ...]:
    try:
        text = read_bytes(Path(path), MAX_SCHEDULE_BYTES).decode("utf-8")
        cells = [row for row in csv.reader(io.StringIO(text, newline="")) if any(cell.strip() for cell in row)]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no CSV file"
        raise ConfigError(f"{name} cannot be read: {reason}; docs/pipeline.md describes such a file") from None
    return tuple(
        tuple(action for column, cell in enumerate(row) for action in _parse_cell(name, cell.strip(), rank, column))
        for rank, row in enumerate(cells)
    )


def _parse_cell(name: str, cell: str, rank: int, column: int) -> ScheduleRow:
    overlap = OVERLAP.fullmatch(cell)
    words = overlap.group(1).split(";") if overlap else [cell] if cell else []
    actions = []
    for word in words:
        match = CELL.fullmatch(word.strip())
        if match is None:
            raise ConfigError(f"{name}, row {rank + 1}, cell {column + 1}: {cell!r} is no action; write one {EXAMPLE}")
        actions.append(Action(int(match.group(1)), match.group(2), int(match.group(3))))
    return tuple(actions)


def _stage_ranks(name: str, rows: Sequence[ScheduleRow], pp: int, virtual_stages: int) -> tuple[int, ...]:
    owner: dict[int, int] = {}
    for rank, row in enumerate(rows):
        for action in row:
            if owner.setdefault(action.stage, rank) != rank:
                raise ConfigError(
                    f"{name}: stage {action.stage} stands on row {owner[action.stage] + 1} and, with {action}, on row "
                    f"{rank + 1}; a stage has one rank"
                )
    if sorted(owner) != list(range(pp * virtual_stages)):
        raise ConfigError(
            f"{name} has the stages {sorted(owner)}, and parallel.pp*parallel.virtual_stages={pp * virtual_stages} "
            f"makes 0 to {pp * virtual_stages - 1}; set virtual_stages, or mend the file"
        )
    counts = [list(owner.values()).count(rank) for rank in range(pp)]
    if counts != [virtual_stages] * pp:
        raise ConfigError(
            f"{name} gives the ranks {counts} stages; each must have parallel.virtual_stages={virtual_stages}"
        )
    return tuple(owner[stage] for stage in sorted(owner))


def _check_complete(name: str, rows: Sequence[ScheduleRow], num_stages: int, num_micro_batches: int) -> None:
    """Every stage does F and either B, or I and W, with every micro-batch, once each."""
    seen: dict[tuple[int, int], list[str]] = {}
    for row in rows:
        for action in row:
            kinds = seen.setdefault((action.stage, action.micro_batch), [])
            if action.kind in kinds:
                raise ConfigError(f"{name}: {action} stands there twice; leave one out")
            kinds.append(action.kind)
    for stage in range(num_stages):
        for micro_batch in range(num_micro_batches):
            kinds = seen.get((stage, micro_batch), [])
            if sorted(kinds) not in (["B", "F"], ["F", "I", "W"]):
                raise ConfigError(
                    f"{name}: stage {stage} does {', '.join(kinds) or 'nothing'} with micro-batch {micro_batch}; it "
                    "must do F and B, or F, I and W"
                )
