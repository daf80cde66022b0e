"""Phases of a step for the flight recorder: which micro-batch a stage computes, and in which direction."""

from contextlib import nullcontext
from typing import Any

from torch import Tensor

from moefold.comm.flight_recorder import FlightRecorder
from moefold.model.module_wrapper import CallContext, Function, wrap_calls, wrap_method
from moefold.model.transformer import Transformer


def record_phases(stage: Transformer, recorder: FlightRecorder) -> None:
    """Record when a micro-batch enters the stage, and when its gradient does.

    Overlapped passes do not call `forward`; their runner records the phases itself.
    """
    wrap_method(stage, "forward", _PhaseRecorder(stage, recorder).wrap)


class _PhaseRecorder:
    """Counts the micro-batches of a step, in order of execution."""

    def __init__(self, stage: Transformer, recorder: FlightRecorder) -> None:
        self._stage = stage
        self._recorder = recorder
        self._step = -1
        self._count = 0

    def wrap(self, forward: Function) -> Function:
        return wrap_calls(forward, self._begin)

    def _begin(self, *args: Any, **kwargs: Any) -> CallContext | None:
        if not self._stage.training:
            self._recorder.set_phase("evaluation")
            return None
        if self._step != self._recorder.step:
            self._step = self._recorder.step
            self._count = 0
        number = self._count
        self._count += 1
        self._recorder.set_phase(f"forward of micro-batch {number}")

        def on_end(output: Tensor) -> None:
            if output.requires_grad:
                output.register_hook(lambda grad: self._recorder.set_phase(f"backward of micro-batch {number}"))

        return CallContext(nullcontext, on_end)
