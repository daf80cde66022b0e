"""What a pipeline rank does together: slots of one action, or of a forward and a backward pass of two micro-batches.

The order of the actions is that of `config.schedule_order` and, where exchanges hide under other work, of
`config.paired_schedule`: that of the runtime. Torch-free.
"""

from moefold.config.action import SlotRow
from moefold.config.paired_schedule import OVERLAPPED_SCHEDULES, overlapped_rows, to_slot_row
from moefold.config.schedule_file import read_schedule
from moefold.config.schedule_order import rank_row
from moefold.config.schedule_walk import one_per_slot
from moefold.errors import ConfigError


def slot_rows(
    schedule: str, pp: int, virtual_stages: int, num_micro_batches: int, *, path: str = "", overlap: bool = False
) -> tuple[SlotRow, ...]:
    """The slots of every pipeline rank, as torch forms them: pairs in DualPipeV, single actions elsewhere.

    Args:
        schedule: a key of `config.schedules.SCHEDULES`; 1f1b with several virtual stages is interleaved.
        pp: pipeline ranks; with 1, micro-batches follow each other.
        virtual_stages: stages of each rank.
        num_micro_batches: of a step.
        path: of the file, for csv.
        overlap: whether exchanges hide under other work: then the steady phase is one of pairs.

    Raises:
        ConfigError: the file is wrong, or the schedule has no pairs.
    """
    if overlap:
        if schedule not in OVERLAPPED_SCHEDULES:
            legal = ", ".join(map(repr, OVERLAPPED_SCHEDULES))
            raise ConfigError(f"overlap needs a schedule of pairs, and {schedule!r} has none; choose one of {legal}")
        return tuple(map(to_slot_row, overlapped_rows(schedule, pp, virtual_stages, num_micro_batches)))
    if schedule == "csv":
        return tuple(one_per_slot(row) for row in read_schedule(path, pp, virtual_stages, num_micro_batches).rows)
    if pp == 1:
        return (one_per_slot(rank_row("1f1b", 0, 1, 1, num_micro_batches)),)
    if schedule == "dualpipev":
        return tuple(map(to_slot_row, overlapped_rows(schedule, pp, virtual_stages, num_micro_batches)))
    name = "interleaved" if schedule == "1f1b" and virtual_stages > 1 else schedule
    return tuple(one_per_slot(rank_row(name, rank, pp, virtual_stages, num_micro_batches)) for rank in range(pp))
