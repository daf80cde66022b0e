"""Which micro-batch a rank is at, for its flight record."""

from typing import Any

from torch import Tensor, nn

from moefold.parallel.flight_record import FlightRecord


def note_phases(stage: nn.Module, record: FlightRecord) -> None:
    """Write into the record when a micro-batch enters the stage, and when its gradient does."""
    rounds = _Rounds(record)
    stage.register_forward_pre_hook(rounds.before_forward)
    stage.register_forward_hook(rounds.after_forward)


class _Rounds:
    """Counts the micro-batches of a step, by the order in which they come."""

    def __init__(self, record: FlightRecord) -> None:
        self._record = record
        self._step = -1
        self._count = 0

    def before_forward(self, stage: nn.Module, args: Any) -> None:
        if not stage.training:
            self._record.enter("evaluation")
            return
        if self._step != self._record.step:
            self._step, self._count = self._record.step, 0
        self._record.enter(f"forward of micro-batch {self._count}")
        self._count += 1

    def after_forward(self, stage: nn.Module, args: Any, output: Tensor) -> None:
        if output.requires_grad:
            phase = f"backward of micro-batch {self._count - 1}"
            output.register_hook(lambda grad: self._record.enter(phase))
