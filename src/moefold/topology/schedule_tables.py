"""The order of work of each pipeline rank under each schedule, as torch.distributed.pipelining runs it. Torch-free.

A test holds these orders to those that torch builds. The memory formulas read off them which micro-batches are in
flight, so that the planner can ask for thousands of mappings.

Schedules whose steady phase pairs a forward pass with the backward pass of another micro-batch. Torch-free.

A pair is one piece of work: both passes have what they need before it begins, and what they made leaves when it ends.
So a rank must be one forward pass further ahead than in interleaved 1F1B, which is two for each rank behind it.

What is to be known of a pipeline schedule before any rank starts: its stages, where they stand. Torch-free.
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


@dataclass(frozen=True)
class ForwardBackward:
    """Two passes of a rank at the same time."""

    forward: Action
    backward: Action


ScheduleItem = Action | ForwardBackward
ScheduleItemRow = tuple[ScheduleItem, ...]

OVERLAPPED_SCHEDULES = ("1f1b", "interleaved", "dualpipev")
"""Those with a steady phase of one forward and one backward pass."""


def overlapped_rows(schedule: str, pp: int, virtual_stages: int, num_micro_batches: int) -> tuple[ScheduleItemRow, ...]:
    """What each pipeline rank does, in order.

    Args:
        schedule: one of `OVERLAPPED_SCHEDULES`.
        pp: pipeline ranks; 1 with one stage.
        virtual_stages: stages of each.
        num_micro_batches: as many as the schedule takes.
    """
    return tuple(overlapped_row(schedule, rank, pp, virtual_stages, num_micro_batches) for rank in range(pp))


def overlapped_row(schedule: str, rank: int, pp: int, virtual_stages: int, num_micro_batches: int) -> ScheduleItemRow:
    """What one pipeline rank does, in order; the arguments are those of `overlapped_rows`."""
    if schedule == "dualpipev" and pp > 1:
        return dualpipev_row(pp, rank, num_micro_batches)
    return tuple(_interleaved_1f1b_row(pp, rank, virtual_stages, num_micro_batches))


def to_slot_row(row: ScheduleItemRow) -> SlotRow:
    """The passes of each piece of work."""
    return tuple(map(to_slot, row))


def to_slot(item: ScheduleItem) -> Slot:
    """The passes of a piece of work."""
    return (item.forward, item.backward) if isinstance(item, ForwardBackward) else (item,)


def _interleaved_1f1b_row(pp: int, rank: int, chunks: int, count: int) -> Iterator[ScheduleItem]:
    """Interleaved 1F1B (arXiv:2104.04473), in rounds as torch has them, with pairs."""
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
    """One action for each stage named, which takes its micro-batches in order."""
    seen: dict[int, int] = {}
    found = []
    for stage in stages:
        found.append(Action(stage, kind, seen.get(stage, 0)))
        seen[stage] = seen.get(stage, 0) + 1
    return found


class _DualPipeVRowBuilder:
    """Collects the row of a rank of a V, which has the stages `first` and `second`."""

    def __init__(self, pp: int, rank: int) -> None:
        self.first, self.second = rank, 2 * pp - 1 - rank
        self.row: list[ScheduleItem] = []
        self._counts: dict[tuple[int, str], int] = {}
        self._pending_weight_grads: list[Action] = []

    def add(self, stage: int, kind: str) -> None:
        """The next micro-batch of a stage: F, B, or I with its W to come."""
        action = self._next_action(stage, kind)
        self.row.append(action)
        if kind == "I":
            self._pending_weight_grads.append(Action(stage, "W", action.micro_batch))

    def add_pair(self, forward: int, backward: int) -> None:
        """A forward pass of one stage beside a backward pass of the other."""
        self.row.append(ForwardBackward(self._next_action(forward, "F"), self._next_action(backward, "B")))

    def add_weight_grad(self) -> None:
        """The oldest gradients of weights that wait, if any do."""
        self.row += self._pending_weight_grads[:1]
        del self._pending_weight_grads[:1]

    def _next_action(self, stage: int, kind: str) -> Action:
        way = "F" if kind == "F" else "I"
        number = self._counts.get((stage, way), 0)
        self._counts[stage, way] = number + 1
        return Action(stage, kind, number)


def dualpipev_row(pp: int, rank: int, count: int) -> ScheduleItemRow:
    """The V of DualPipe (arXiv:2412.19437), in the eight parts of github.com/deepseek-ai/DualPipe and of torch."""
    v = _DualPipeVRowBuilder(pp, rank)
    behind = pp - rank - 1
    for _ in range(2 * behind):
        v.add(v.first, "F")
    for _ in range(rank + 1):
        v.add(v.first, "F")
        v.add(v.second, "F")
    for _ in range(behind):
        v.add(v.second, "I")
        v.add_weight_grad()
        v.add(v.second, "F")
    for i in range(count - 2 * pp + rank + 1):
        if i == 0 and behind == 0:
            # Both stages of the turn of the V are here: apart, the bubble is smaller.
            v.add(v.first, "F")
            v.add(v.second, "B")
        else:
            v.add_pair(v.first, v.second)
        v.add_pair(v.second, v.first)
    for _ in range(behind):
        v.add(v.second, "B")
        v.add_pair(v.second, v.first)
    # From the middle of the last backward passes on, the gradients of weights wait and fill what is left.
    passes = [stage for _ in range(rank + 1) for stage in (v.second, v.first)]
    splits_from = 2 * ((rank + 1) // 2) + (rank % 2 == 0)
    for i, stage in enumerate(passes):
        v.add(stage, "I" if i >= splits_from else "B")
    for _ in range(behind):
        v.add_weight_grad()
        v.add(v.first, "I" if len(passes) > splits_from else "B")
    for _ in range(rank + 1):
        v.add_weight_grad()
    return tuple(v.row)


Placement = Literal["loop", "v", "file"]


@dataclass(frozen=True)
class ScheduleKind:
    """The traits of a schedule."""

    virtual_stage_bounds: tuple[int, int | None]
    """Fewest and most virtual stages."""
    placement: Placement
    """loop: stage s on pipeline rank s mod pp. v: rank r has stages r and 2*pp-1-r. file: the CSV file says."""
    splits_backward: bool
    """Weight gradients are computed apart from, and later than, those of the inputs."""


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
    """The pipeline rank of each stage, in the order of the model.

    Raises:
        ConfigError: the schedule is read from a file, which cannot be read.
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
