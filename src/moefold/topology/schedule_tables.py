"""Pipeline schedules: the actions of each pipeline rank in order, and the rank of each stage. Torch-free.

The orders equal those of torch.distributed.pipelining (tested). The memory formulas read the micro-batches in flight
off them.

Overlapped schedules pair a forward pass with the backward pass of another micro-batch in the steady phase. Both passes
of a pair start when both have their inputs, and send their results when both are done. So a rank must be one forward
pass further ahead than in interleaved 1F1B: two for each later rank.
"""

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from moefold.config.schema import Config, ParallelConfig, has_moe_layers
from moefold.topology.pipeline_action import Action, ScheduleRow, ScheduleTable, Slot, SlotRow, one_per_slot
from moefold.topology.schedule_csv import read_schedule


def build_schedule_table(cfg: Config) -> ScheduleTable:
    """Return the actions of each pipeline rank in a step, in order, without sends; pp=1 runs micro-batches in turn.

    Raises:
        ConfigError: the schedule file cannot be read.
    """
    p = cfg.parallel
    count = cfg.num_micro_batches
    if p.pp == 1 and p.schedule != "csv":
        return ScheduleTable((_single_stage_row(count),), (0,))
    if p.schedule == "csv":
        return read_schedule(p.schedule_csv, p.pp, p.virtual_stages, count)
    rows = tuple(rank_row(p.schedule, rank, p.pp, p.virtual_stages, count) for rank in range(p.pp))
    return ScheduleTable(rows, stage_ranks(p))


def schedule_slots(cfg: Config) -> tuple[SlotRow, ...]:
    """Return the slots of each pipeline rank: pairs of passes with `overlap_experts`, else single actions.

    Raises:
        ConfigError: see `build_schedule_table`.
    """
    p = cfg.parallel
    if p.overlap_experts and has_moe_layers(cfg.model):
        return tuple(map(to_slot_row, overlapped_rows(p.schedule, p.pp, p.virtual_stages, cfg.num_micro_batches)))
    return tuple(map(one_per_slot, build_schedule_table(cfg).rows))


@lru_cache(maxsize=4096)
def rank_row(schedule: str, rank: int, pp: int, chunks: int, count: int) -> ScheduleRow:
    """Return the actions of one pipeline rank.

    Args:
        schedule: one of SCHEDULES except csv.
        rank: pipeline rank.
        pp: number of pipeline ranks.
        chunks: stages per rank.
        count: number of micro-batches.
    """
    match schedule:
        case "gpipe":
            builder = _RowBuilder()
            builder.add(rank, "F" * count)
            builder.add(rank, "B" * count)
        case "1f1b":
            builder = _RowBuilder()
            ahead = min(count, pp - rank)
            builder.add(rank, "F" * ahead + "BF" * (count - ahead) + "B" * ahead)
        case "interleaved" | "zero-bubble":
            builder = _interleaved(rank, pp, chunks, count, splits_backward=schedule == "zero-bubble")
        case "zbv":
            builder = _zbv(rank, pp, count)
        case "dualpipev":
            # The passes of a pair run one after the other.
            return tuple(action for builder in dualpipev_row(pp, rank, count) for action in to_slot(builder))
        case _:
            raise ValueError(f"unknown schedule {schedule!r}")
    return tuple(action for action in builder.row if action.micro_batch < count)


def _single_stage_row(count: int) -> ScheduleRow:
    return tuple(Action(0, kind, i) for i in range(count) for kind in "FB")


class _RowBuilder:
    """Builder of a schedule row: each kind of action of a stage takes its micro-batches in order."""

    def __init__(self) -> None:
        self.row: list[Action] = []
        self._next: Counter[tuple[int, str]] = Counter()

    def add(self, stage: int, kinds: str) -> None:
        """Append the next micro-batch of each of these kinds; B advances both I and W."""
        for kind in kinds:
            key = (stage, "I" if kind == "B" else kind)
            self.row.append(Action(stage, kind, self._next[key]))
            self._next[key] += 1
            if kind == "B":
                self._next[stage, "W"] += 1


def _interleaved(rank: int, pp: int, chunks: int, count: int, *, splits_backward: bool) -> _RowBuilder:
    """Build a row of interleaved 1F1B (arXiv:2104.04473), or of ZB1P (arXiv:2401.10241) if the backward is split."""
    per_round = count // max(1, count // pp)
    total = chunks * count
    ahead = min((chunks - 1) * per_round + (1 if splits_backward else 2) * (pp - 1 - rank), total)

    def stage_of(step: int, *, backward: bool) -> int:
        chunk = step // per_round % chunks
        return (chunks - 1 - chunk if backward else chunk) * pp + rank

    builder = _RowBuilder()
    pending = deque[int]()
    for step in range(total + ahead):
        if step < total:
            builder.add(stage_of(step, backward=False), "F")
        if step < ahead:
            continue
        stage = stage_of(step - ahead, backward=True)
        builder.add(stage, "I" if splits_backward else "B")
        pending.append(stage)
        if splits_backward and step - ahead >= rank:
            builder.add(pending.popleft(), "W")
    while splits_backward and pending:
        builder.add(pending.popleft(), "W")
    return builder


def _zbv(rank: int, pp: int, count: int) -> _RowBuilder:
    """Build a row of ZBV (arXiv:2401.10241); the caller drops micro-batches beyond `count`."""
    first = rank
    second = 2 * pp - 1 - rank
    count = max(2 * pp - 1, count)
    builder = _RowBuilder()
    builder.add(first, "F" * (2 * (pp - rank) - 1))
    for _ in range(rank):
        builder.add(second, "F")
        builder.add(first, "F")
    builder.add(second, "FIW" * (pp - rank))
    started = 2 * pp - 1 - rank
    done = pp
    while done < started or started < count:
        if started < count:
            builder.add(first, "F")
            started += 1
        builder.add(first, "IW")
        builder.add(second, "FIW")
        done += 1
    for _ in range(rank):
        builder.add(first, "I")
        builder.add(second, "I")
    builder.add(first, "IW" * (pp - rank))
    builder.add(second, "W" * rank)
    builder.add(first, "W" * rank)
    return builder


@dataclass(frozen=True)
class ForwardBackward:
    """Overlapped forward and backward pass of a rank."""

    forward: Action
    backward: Action


ScheduleItem = Action | ForwardBackward
ScheduleItemRow = tuple[ScheduleItem, ...]

OVERLAPPED_SCHEDULES = ("1f1b", "interleaved", "dualpipev")
"""Schedules with a steady phase of one forward and one backward pass."""


def overlapped_rows(schedule: str, pp: int, virtual_stages: int, num_micro_batches: int) -> tuple[ScheduleItemRow, ...]:
    """Return the actions and pairs of each pipeline rank, in order.

    Args:
        schedule: one of `OVERLAPPED_SCHEDULES`.
        pp: number of pipeline ranks; 1 with one stage.
        virtual_stages: stages per rank.
        num_micro_batches: a number that the schedule accepts.
    """
    return tuple(overlapped_row(schedule, rank, pp, virtual_stages, num_micro_batches) for rank in range(pp))


def overlapped_row(schedule: str, rank: int, pp: int, virtual_stages: int, num_micro_batches: int) -> ScheduleItemRow:
    """Return the actions and pairs of one pipeline rank, in order; see `overlapped_rows`."""
    if schedule == "dualpipev" and pp > 1:
        return dualpipev_row(pp, rank, num_micro_batches)
    return tuple(_interleaved_1f1b_row(pp, rank, virtual_stages, num_micro_batches))


def to_slot_row(row: ScheduleItemRow) -> SlotRow:
    """Return the slots of a row."""
    return tuple(map(to_slot, row))


def to_slot(item: ScheduleItem) -> Slot:
    """Return the slot of an item: its one or two passes."""
    return (item.forward, item.backward) if isinstance(item, ForwardBackward) else (item,)


def _interleaved_1f1b_row(pp: int, rank: int, chunks: int, count: int) -> Iterator[ScheduleItem]:
    """Yield interleaved 1F1B (arXiv:2104.04473) with pairs, in the rounds of torch."""
    per_round = count // max(1, count // pp)
    total = chunks * count
    chunk_of = [i // per_round % chunks for i in range(total)] if chunks > 1 else [0] * total
    forward = _number_micro_batches("F", [chunk * pp + rank for chunk in chunk_of])
    backward = _number_micro_batches("B", [(chunks - 1 - chunk) * pp + rank for chunk in chunk_of])
    ahead = min(total, (chunks - 1) * per_round + 2 * (pp - 1 - rank) + 1)
    yield from forward[:ahead]
    yield from map(ForwardBackward, forward[ahead:], backward)
    yield from backward[total - ahead :]


def _number_micro_batches(kind: str, stages: Sequence[int]) -> list[Action]:
    """Return one action per entry of `stages`, with the micro-batches of each stage in order."""
    seen: dict[int, int] = {}
    found = []
    for stage in stages:
        found.append(Action(stage, kind, seen.get(stage, 0)))
        seen[stage] = seen.get(stage, 0) + 1
    return found


class _DualPipeVRowBuilder:
    """Builder of a DualPipeV row for a rank with the stages `first` and `second`."""

    def __init__(self, pp: int, rank: int) -> None:
        self.first = rank
        self.second = 2 * pp - 1 - rank
        self.row: list[ScheduleItem] = []
        self._counts: dict[tuple[int, str], int] = {}
        self._pending_weight_grads: list[Action] = []

    def add(self, stage: int, kind: str) -> None:
        """Append the next micro-batch of a stage: F, B, or I, whose W stays pending."""
        action = self._next_action(stage, kind)
        self.row.append(action)
        if kind == "I":
            self._pending_weight_grads.append(Action(stage, "W", action.micro_batch))

    def add_pair(self, forward: int, backward: int) -> None:
        """Append an overlapped pair: the forward pass of one stage and the backward pass of the other."""
        self.row.append(ForwardBackward(self._next_action(forward, "F"), self._next_action(backward, "B")))

    def add_weight_grad(self) -> None:
        """Append the oldest pending W action, if any."""
        self.row += self._pending_weight_grads[:1]
        del self._pending_weight_grads[:1]

    def _next_action(self, stage: int, kind: str) -> Action:
        counted_as = "F" if kind == "F" else "I"
        number = self._counts.get((stage, counted_as), 0)
        self._counts[stage, counted_as] = number + 1
        return Action(stage, kind, number)


def dualpipev_row(pp: int, rank: int, count: int) -> ScheduleItemRow:
    """Build a row of DualPipeV (arXiv:2412.19437), in the eight phases of github.com/deepseek-ai/DualPipe and torch."""
    v = _DualPipeVRowBuilder(pp, rank)
    num_later = pp - rank - 1
    for _ in range(2 * num_later):
        v.add(v.first, "F")
    for _ in range(rank + 1):
        v.add(v.first, "F")
        v.add(v.second, "F")
    for _ in range(num_later):
        v.add(v.second, "I")
        v.add_weight_grad()
        v.add(v.second, "F")
    for i in range(count - 2 * pp + rank + 1):
        if i == 0 and num_later == 0:
            # This rank has both stages at the bottom of the V: running them one after the other gives a smaller bubble.
            v.add(v.first, "F")
            v.add(v.second, "B")
        else:
            v.add_pair(v.first, v.second)
        v.add_pair(v.second, v.first)
    for _ in range(num_later):
        v.add(v.second, "B")
        v.add_pair(v.second, v.first)
    # From the middle of the last backward passes on, W actions are deferred to fill the remaining bubble.
    backward_stages = [stage for _ in range(rank + 1) for stage in (v.second, v.first)]
    splits_from = 2 * ((rank + 1) // 2) + (rank % 2 == 0)
    for i, stage in enumerate(backward_stages):
        v.add(stage, "I" if i >= splits_from else "B")
    for _ in range(num_later):
        v.add_weight_grad()
        v.add(v.first, "I" if len(backward_stages) > splits_from else "B")
    for _ in range(rank + 1):
        v.add_weight_grad()
    return tuple(v.row)


Placement = Literal["loop", "v", "file"]


@dataclass(frozen=True)
class ScheduleKind:
    """Properties of a schedule."""

    virtual_stage_bounds: tuple[int, int | None]
    """Minimum and maximum number of virtual stages."""
    placement: Placement
    """loop: stage s on pipeline rank s mod pp. v: rank r has stages r and 2*pp-1-r. file: as in the CSV file."""
    splits_backward: bool
    """Weight gradients are computed separately from, and later than, the input gradients."""


SCHEDULES: dict[str, ScheduleKind] = {
    "gpipe": ScheduleKind((1, 1), "loop", False),
    "1f1b": ScheduleKind((1, 1), "loop", False),
    "interleaved": ScheduleKind((2, None), "loop", False),
    "zero-bubble": ScheduleKind((1, None), "loop", True),
    "zbv": ScheduleKind((2, 2), "v", True),
    "dualpipev": ScheduleKind((2, 2), "v", True),
    "csv": ScheduleKind((1, None), "file", True),
}


def stage_ranks(p: ParallelConfig) -> tuple[int, ...]:
    """Return the pipeline rank of each stage, in model order.

    Raises:
        ConfigError: the schedule file cannot be read.
    """
    placement = SCHEDULES[p.schedule].placement
    if p.pp == 1 and placement != "file":
        return (0,) * p.virtual_stages
    if placement == "v":
        return (*range(p.pp), *reversed(range(p.pp)))
    if placement == "file":
        from moefold.topology.schedule_csv import read_schedule

        return read_schedule(p.schedule_csv, p.pp, p.virtual_stages).stage_to_rank
    return tuple(stage % p.pp for stage in range(p.pp * p.virtual_stages))
