"""Row generators of the pipeline schedules: the slots of one pipeline rank, in order. Torch-free.

The orders of the built-in schedules equal the orders of torch.distributed.pipelining (tested). A generator takes the
pipeline rank, the number of pipeline ranks, of stages per rank and of micro-batches.

Overlapped schedules pair a forward pass with the backward pass of another micro-batch in the steady phase. Both passes
of a pair start when both have their inputs, and send their results when both are done. So a rank must be one forward
pass further ahead than in interleaved 1F1B: two for each later rank.
"""

from collections import Counter, deque
from collections.abc import Callable

from moefold.topology.pipeline_action import Action, Slot, SlotRow

RowGenerator = Callable[[int, int, int, int], SlotRow]


class RowBuilder:
    """Builder of a row: each kind of action of a stage takes its micro-batches in order."""

    def __init__(self) -> None:
        self._slots: list[Slot] = []
        self._next: Counter[tuple[int, str]] = Counter()
        self._pending_weight_grads = deque[int]()

    @property
    def row(self) -> SlotRow:
        """The slots so far."""
        return tuple(self._slots)

    def add(self, stage: int, kinds: str) -> None:
        """Append the next micro-batch of each of these kinds, one per slot; B advances both I and W."""
        self._slots += [(self._next_action(stage, kind),) for kind in kinds]

    def add_pair(self, forward: int, backward: int) -> None:
        """Append a pair: the forward pass of one stage and the whole backward pass of another micro-batch."""
        self._slots.append((self._next_action(forward, "F"), self._next_action(backward, "B")))

    def add_input_grad(self, stage: int) -> None:
        """Append the next I action of a stage, whose W action stays pending."""
        self.add(stage, "I")
        self._pending_weight_grads.append(stage)

    def add_weight_grads(self, count: int | None = None) -> None:
        """Append the oldest pending W actions: `count` of them, as far as there are any; None: all."""
        pending = self._pending_weight_grads
        for _ in range(len(pending) if count is None else min(count, len(pending))):
            self.add(pending.popleft(), "W")

    def _next_action(self, stage: int, kind: str) -> Action:
        key = (stage, "I" if kind == "B" else kind)
        action = Action(stage, kind, self._next[key])
        self._next[key] += 1
        if kind == "B":
            self._next[stage, "W"] += 1
        return action


def gpipe_row(rank: int, pp: int, num_stages: int, count: int) -> SlotRow:
    """Build a row of GPipe (arXiv:1811.06965): all forward passes, then all backward passes."""
    builder = RowBuilder()
    builder.add(rank, "F" * count)
    builder.add(rank, "B" * count)
    return builder.row


def one_f_one_b_row(rank: int, pp: int, num_stages: int, count: int) -> SlotRow:
    """Build a row of 1F1B (arXiv:2006.09503); with several stages per rank, of interleaved 1F1B."""
    if num_stages > 1:
        return interleaved_row(rank, pp, num_stages, count)
    ahead = min(count, pp - rank)
    builder = RowBuilder()
    builder.add(rank, "F" * ahead + "BF" * (count - ahead) + "B" * ahead)
    return builder.row


def interleaved_row(rank: int, pp: int, num_stages: int, count: int) -> SlotRow:
    """Build a row of interleaved 1F1B (arXiv:2104.04473)."""
    forward, backward, per_round = _interleaved_stages(rank, pp, num_stages, count)
    ahead = min((num_stages - 1) * per_round + 2 * (pp - 1 - rank), len(forward))
    builder = RowBuilder()
    for stage in forward[:ahead]:
        builder.add(stage, "F")
    for next_forward, next_backward in zip(forward[ahead:], backward, strict=False):
        builder.add(next_forward, "F")
        builder.add(next_backward, "B")
    for stage in backward[len(forward) - ahead :]:
        builder.add(stage, "B")
    return builder.row


def overlapped_interleaved_row(rank: int, pp: int, num_stages: int, count: int) -> SlotRow:
    """Build a row of interleaved 1F1B, or of 1F1B with one stage per rank, whose steady phase consists of pairs."""
    forward, backward, per_round = _interleaved_stages(rank, pp, num_stages, count)
    ahead = min((num_stages - 1) * per_round + 2 * (pp - 1 - rank) + 1, len(forward))
    builder = RowBuilder()
    for stage in forward[:ahead]:
        builder.add(stage, "F")
    for next_forward, next_backward in zip(forward[ahead:], backward, strict=False):
        builder.add_pair(next_forward, next_backward)
    for stage in backward[len(forward) - ahead :]:
        builder.add(stage, "B")
    return builder.row


def zero_bubble_row(rank: int, pp: int, num_stages: int, count: int) -> SlotRow:
    """Build a row of ZB1P (arXiv:2401.10241), interleaved if there are several stages per rank."""
    forward, backward, per_round = _interleaved_stages(rank, pp, num_stages, count)
    ahead = min((num_stages - 1) * per_round + pp - 1 - rank, len(forward))
    builder = RowBuilder()
    for stage in forward[:ahead]:
        builder.add(stage, "F")
    for i, stage in enumerate(backward):
        if ahead + i < len(forward):
            builder.add(forward[ahead + i], "F")
        builder.add_input_grad(stage)
        if i >= rank:
            builder.add_weight_grads(1)
    builder.add_weight_grads()
    return builder.row


def _interleaved_stages(rank: int, pp: int, num_stages: int, count: int) -> tuple[list[int], list[int], int]:
    """Return the stages of the forward and of the backward passes, in order, and the micro-batches of a round.

    A rank runs a round of micro-batches through one stage before it goes to its next one, in rounds of equal length.
    """
    per_round = count // max(1, count // pp)
    local = [step // per_round % num_stages for step in range(num_stages * count)]
    forward = [i * pp + rank for i in local]
    backward = [(num_stages - 1 - i) * pp + rank for i in local]
    return forward, backward, per_round


def zbv_row(rank: int, pp: int, num_stages: int, count: int) -> SlotRow:
    """Build a row of ZBV (arXiv:2401.10241), which is drawn for 2*pp-1 micro-batches or more and cut to `count`."""
    first = rank
    second = 2 * pp - 1 - rank
    drawn = max(2 * pp - 1, count)
    builder = RowBuilder()
    builder.add(first, "F" * (2 * (pp - rank) - 1))
    for _ in range(rank):
        builder.add(second, "F")
        builder.add(first, "F")
    builder.add(second, "FIW" * (pp - rank))
    started = 2 * pp - 1 - rank
    done = pp
    while done < started or started < drawn:
        if started < drawn:
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
    return tuple(slot for slot in builder.row if slot[0].micro_batch < count)


def dualpipev_row(rank: int, pp: int, num_stages: int, count: int) -> SlotRow:
    """Build a row of DualPipeV (arXiv:2412.19437), in the eight phases of github.com/deepseek-ai/DualPipe and torch."""
    first = rank
    second = 2 * pp - 1 - rank
    num_later = pp - rank - 1
    builder = RowBuilder()
    builder.add(first, "F" * (2 * num_later))
    for _ in range(rank + 1):
        builder.add(first, "F")
        builder.add(second, "F")
    for _ in range(num_later):
        builder.add_input_grad(second)
        builder.add_weight_grads(1)
        builder.add(second, "F")
    for i in range(count - 2 * pp + rank + 1):
        if i == 0 and num_later == 0:
            # This rank has both stages at the bottom of the V: running them one after the other gives a smaller bubble.
            builder.add(first, "F")
            builder.add(second, "B")
        else:
            builder.add_pair(first, second)
        builder.add_pair(second, first)
    for _ in range(num_later):
        builder.add(second, "B")
        builder.add_pair(second, first)
    # From the middle of the last backward passes on, W actions are deferred to fill the remaining bubble.
    splits_from = 2 * ((rank + 1) // 2) + (rank % 2 == 0)
    for i, stage in enumerate((second, first) * (rank + 1)):
        if i < splits_from:
            builder.add(stage, "B")
        else:
            builder.add_input_grad(stage)
    for _ in range(num_later):
        builder.add_weight_grads(1)
        builder.add_input_grad(first)
    builder.add_weight_grads(rank + 1)
    return builder.row
