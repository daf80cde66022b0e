"""Builder of the rows of pipeline schedules."""

from collections import defaultdict, deque
from itertools import count

from moefold.config.base.pipeline_actions import Action, Slot, SlotRow


class RowBuilder:
    """Builder of a row: each kind of action of a stage takes its micro-batches in order."""

    def __init__(self) -> None:
        self._slots: list[Slot] = []
        self._numbers = defaultdict[tuple[int, str], "count[int]"](count)
        self._pending_weight_grads = deque[int]()

    @property
    def row(self) -> SlotRow:
        """The slots so far."""
        return tuple(self._slots)

    def add(self, stage: int, kinds: str) -> None:
        """Append the next micro-batch of each of these kinds, one per slot. B advances both I and W."""
        for kind in kinds:
            self._slots.append((self._next_action(stage, kind),))

    def add_pair(self, forward: int, backward: int) -> None:
        """Append a pair: the forward pass of one stage and the whole backward pass of another micro-batch."""
        self._slots.append((self._next_action(forward, "F"), self._next_action(backward, "B")))

    def add_input_grad(self, stage: int) -> None:
        """Append the next I action of a stage, and keep its W action pending."""
        self.add(stage, "I")
        self._pending_weight_grads.append(stage)

    def add_weight_grads(self, num_actions: int | None = None) -> None:
        """Append up to `num_actions` of the oldest pending W actions. None: all."""
        pending = self._pending_weight_grads
        for _ in range(len(pending) if num_actions is None else min(num_actions, len(pending))):
            self.add(pending.popleft(), "W")

    def _next_action(self, stage: int, kind: str) -> Action:
        if kind == "B":
            next(self._numbers[stage, "W"])
        return Action(stage, kind, next(self._numbers[stage, "I" if kind == "B" else kind]))
