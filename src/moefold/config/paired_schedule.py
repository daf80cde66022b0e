"""Schedules whose steady phase pairs a forward pass with the backward pass of another micro-batch. Torch-free.

A pair is one piece of work: both passes have what they need before it begins, and what they made leaves when it ends.
So a rank must be one forward pass further ahead than in interleaved 1F1B, which is two for each rank behind it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from moefold.config.action import Action, Slot, SlotRow


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
