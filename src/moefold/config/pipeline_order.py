"""Builder of the rows of pipeline schedules, and interleaved 1F1B, which several schedules share.

Overlapped schedules pair a forward pass with the backward pass of another micro-batch in the steady phase. Both passes
of a pair start when the inputs of both are available, and send their results when both have finished. A rank is
therefore one more forward pass ahead than in interleaved 1F1B: two for each later rank.
"""

from collections import Counter, deque
from typing import Any

from moefold.config.pipeline_actions import Action, Slot, SlotRow


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
        """Append the next I action of a stage, and keep its W action pending."""
        self.add(stage, "I")
        self._pending_weight_grads.append(stage)

    def add_weight_grads(self, count: int | None = None) -> None:
        """Append up to `count` of the oldest pending W actions; None: all."""
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


def interleaved_row(rank: int, pp: int, num_stages: int, count: int) -> SlotRow:
    """Build a row of interleaved 1F1B (arXiv:2104.04473)."""
    forward, backward, per_round = interleaved_stages(rank, pp, num_stages, count)
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
    forward, backward, per_round = interleaved_stages(rank, pp, num_stages, count)
    ahead = min((num_stages - 1) * per_round + 2 * (pp - 1 - rank) + 1, len(forward))
    builder = RowBuilder()
    for stage in forward[:ahead]:
        builder.add(stage, "F")
    for next_forward, next_backward in zip(forward[ahead:], backward, strict=False):
        builder.add_pair(next_forward, next_backward)
    for stage in backward[len(forward) - ahead :]:
        builder.add(stage, "B")
    return builder.row


def interleaved_stages(rank: int, pp: int, num_stages: int, count: int) -> tuple[list[int], list[int], int]:
    """Return the stages of the forward passes and of the backward passes, in order, and the micro-batches of a round.

    A rank runs a round of micro-batches through one stage, then through the next stage. All rounds have equal length.
    """
    per_round = count // max(1, count // pp)
    local = [step // per_round % num_stages for step in range(num_stages * count)]
    forward = [i * pp + rank for i in local]
    backward = [(num_stages - 1 - i) * pp + rank for i in local]
    return forward, backward, per_round


def interleaved_bubble_s(forward_s: Any, backward_s: Any, pp: int, num_stages: Any, count: int) -> Any:
    """Return the bubble (pp-1)(f+b)/vpp, plus (pp-n)(f+b) if a chunk waits for the last rank of the previous chunk."""
    step_s = forward_s + backward_s
    if count >= pp:
        return (pp - 1) * step_s / num_stages
    return step_s * ((pp - count) + (count - 1) / num_stages)
