"""The order of work of each pipeline rank under each schedule, as torch.distributed.pipelining runs it. Torch-free.

A test holds these orders to those that torch builds. The memory formulas read off them which micro-batches are in
flight, so that the planner can ask for thousands of mappings.
"""

from collections import Counter, deque
from functools import lru_cache

from moefold.config.action import Action, ScheduleRow, ScheduleTable, SlotRow
from moefold.config.checks_model import has_moe_layers
from moefold.config.paired_schedule import dualpipev_row, overlapped_rows, to_slot, to_slot_row
from moefold.config.schedule_file import read_schedule
from moefold.config.schedule_walk import one_per_slot
from moefold.config.schedules import stage_ranks
from moefold.config.schema import Config


def build_schedule_table(cfg: Config) -> ScheduleTable:
    """What each pipeline rank does in a step, in order, without the sending. With pp=1, micro-batch after micro-batch.

    Raises:
        ConfigError: the schedule is read from a file, which cannot be read.
    """
    p, count = cfg.parallel, cfg.num_micro_batches
    if p.pp == 1 and p.schedule != "csv":
        return ScheduleTable((_single_stage_row(count),), (0,))
    if p.schedule == "csv":
        return read_schedule(p.schedule_csv, p.pp, p.virtual_stages, count)
    rows = tuple(rank_row(p.schedule, rank, p.pp, p.virtual_stages, count) for rank in range(p.pp))
    return ScheduleTable(rows, stage_ranks(p))


def schedule_slots(cfg: Config) -> tuple[SlotRow, ...]:
    """The same with what begins together: pairs, where experts' communication is hidden.

    Raises:
        ConfigError: as of `build_schedule_table`.
    """
    p = cfg.parallel
    if p.overlap_experts and has_moe_layers(cfg.model):
        return tuple(map(to_slot_row, overlapped_rows(p.schedule, p.pp, p.virtual_stages, cfg.num_micro_batches)))
    return tuple(map(one_per_slot, build_schedule_table(cfg).rows))


@lru_cache(maxsize=4096)
def rank_row(schedule: str, rank: int, pp: int, chunks: int, count: int) -> ScheduleRow:
    """The work of one pipeline rank.

    Args:
        schedule: one of SCHEDULES but csv.
        rank: its pipeline rank.
        pp: pipeline ranks.
        chunks: stages of each.
        count: micro-batches.
    """
    match schedule:
        case "gpipe":
            work = _RowBuilder()
            work.add(rank, "F" * count)
            work.add(rank, "B" * count)
        case "1f1b":
            work = _RowBuilder()
            ahead = min(count, pp - rank)
            work.add(rank, "F" * ahead + "BF" * (count - ahead) + "B" * ahead)
        case "interleaved" | "zero-bubble":
            work = _interleaved(rank, pp, chunks, count, splits_backward=schedule == "zero-bubble")
        case "zbv":
            work = _zbv(rank, pp, count)
        case "dualpipev":
            # Pairs stand one after the other.
            return tuple(action for work in dualpipev_row(pp, rank, count) for action in to_slot(work))
        case _:
            raise ValueError(f"no order is known for schedule {schedule!r}")
    return tuple(action for action in work.row if action.micro_batch < count)


def _single_stage_row(count: int) -> ScheduleRow:
    return tuple(Action(0, kind, i) for i in range(count) for kind in "FB")


class _RowBuilder:
    """A row under construction: each kind of work of a stage takes its micro-batches in order."""

    def __init__(self) -> None:
        self.row: list[Action] = []
        self._next: Counter[tuple[int, str]] = Counter()

    def add(self, stage: int, kinds: str) -> None:
        """Do the next micro-batch of each of these kinds; B takes those of I and W."""
        for kind in kinds:
            key = (stage, "I" if kind == "B" else kind)
            self.row.append(Action(stage, kind, self._next[key]))
            self._next[key] += 1
            if kind == "B":
                self._next[stage, "W"] += 1


def _interleaved(rank: int, pp: int, chunks: int, count: int, *, splits_backward: bool) -> _RowBuilder:
    """Interleaved 1F1B (arXiv:2104.04473), or ZB1P (arXiv:2401.10241) if the backward pass is split."""
    per_round = count // max(1, count // pp)
    total = chunks * count
    ahead = min((chunks - 1) * per_round + (1 if splits_backward else 2) * (pp - 1 - rank), total)

    def stage_of(step: int, *, backward: bool) -> int:
        chunk = step // per_round % chunks
        return (chunks - 1 - chunk if backward else chunk) * pp + rank

    work, waiting = _RowBuilder(), deque[int]()
    for step in range(total + ahead):
        if step < total:
            work.add(stage_of(step, backward=False), "F")
        if step < ahead:
            continue
        stage = stage_of(step - ahead, backward=True)
        work.add(stage, "I" if splits_backward else "B")
        waiting.append(stage)
        if splits_backward and step - ahead >= rank:
            work.add(waiting.popleft(), "W")
    while splits_backward and waiting:
        work.add(waiting.popleft(), "W")
    return work


def _zbv(rank: int, pp: int, count: int) -> _RowBuilder:
    """The V-shaped schedule without bubbles of arXiv:2401.10241; what lies beyond `count` is dropped by the caller."""
    first, second = rank, 2 * pp - 1 - rank
    count = max(2 * pp - 1, count)
    work = _RowBuilder()
    work.add(first, "F" * (2 * (pp - rank) - 1))
    for _ in range(rank):
        work.add(second, "F")
        work.add(first, "F")
    work.add(second, "FIW" * (pp - rank))
    started, done = 2 * pp - 1 - rank, pp
    while done < started or started < count:
        if started < count:
            work.add(first, "F")
            started += 1
        work.add(first, "IW")
        work.add(second, "FIW")
        done += 1
    for _ in range(rank):
        work.add(first, "I")
        work.add(second, "I")
    work.add(first, "IW" * (pp - rank))
    work.add(second, "W" * rank)
    work.add(first, "W" * rank)
    return work
