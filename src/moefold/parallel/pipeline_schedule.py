"""Pipeline schedule: runs the slots of a rank, and its messages, in the order of their plan."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moefold.comm.comm_timer import CommTimer
from moefold.comm.flight_recorder import FlightRecorder
from moefold.comm.resumable import BackwardOverlap
from moefold.config.base.pipeline_actions import Action, ActionResult, Slot
from moefold.parallel.pipeline_stage import PipelineStage
from moefold.topology.message_plan import RankPlan, Receive, Release, Send, received


class PipelineMessages:
    """Sends and receives the results of stages, all of one shape. Results for a stage of this rank are not sent.

    A sent tensor and a receive buffer are referenced until their communication is waited for on the current stream, so
    that later work of that stream may use their memory again.
    """

    def __init__(
        self, group: dist.ProcessGroup | None, shape: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> None:
        self._group = group
        self._shape = tuple(shape)
        self._dtype = dtype
        self._device = device
        self._results: dict[ActionResult, Tensor] = {}
        self._receiving: dict[ActionResult, tuple[Tensor, dist.Work]] = {}
        self._sending: dict[ActionResult, tuple[Tensor, dist.Work]] = {}

    @property
    def is_empty(self) -> bool:
        """True if no message is in memory."""
        return not (self._results or self._receiving or self._sending)

    def clear(self) -> None:
        """Drop the messages that an interrupted step has left."""
        for messages in (self._results, self._receiving, self._sending):
            messages.clear()

    def allocate(self) -> Tensor:
        """Allocate a receive buffer."""
        return torch.empty(self._shape, dtype=self._dtype, device=self._device)

    def receive(self, message: ActionResult, peer: int) -> None:
        """Post the receive of a message from a rank of the group."""
        buffer = self.allocate()
        work = dist.irecv(buffer, group=self._group, group_src=peer)
        assert work is not None
        self._receiving[message] = buffer, work

    def put(self, message: ActionResult, tensor: Tensor) -> None:
        """Keep the result of a stage for another stage, until it is sent or taken."""
        self._results[message] = tensor

    def take(self, message: ActionResult) -> Tensor:
        """Return the input of a stage of this rank, once it is received, and forget it."""
        if message in self._results:
            return self._results.pop(message)
        buffer, work = self._receiving.pop(message)
        work.wait()
        return buffer

    def send(self, message: ActionResult, peer: int) -> None:
        """Start to send a result to a rank of the group."""
        tensor = self._results.pop(message).contiguous()
        work = dist.isend(tensor, group=self._group, group_dst=peer)
        assert work is not None
        self._sending[message] = tensor, work

    def release(self, message: ActionResult) -> None:
        """Wait until a result is sent, and free it."""
        _, work = self._sending.pop(message)
        work.wait()


MicroBatch = tuple[Tensor, dict[str, Any]]
"""Arguments of the model: tokens, which only the first stage reads, and keywords, which every stage gets."""
PASSES = {"F": "forward", "B": "backward", "I": "backward", "W": "weight gradients"}
"""Names of the kinds of actions in the phases of a step."""


class PipelineSchedule:
    """Runs the stages of this rank on all micro-batches.

    Args:
        comm_timer: counts the passes of the stages as working.
        pairs: resumes the forward pass of a slot during its backward pass. None means the passes run one after the
    other.
    """

    def __init__(
        self,
        stages: Sequence[PipelineStage],
        num_stages: int,
        plan: RankPlan,
        messages: PipelineMessages,
        *,
        comm_timer: CommTimer,
        pairs: "OverlappedPairs | None" = None,
    ) -> None:
        self._stages = {stage.index: stage for stage in stages}
        self._num_stages = num_stages
        self._plan = plan
        self._messages = messages
        self._comm_timer = comm_timer
        self._pairs = pairs

    def run(self, micro_batches: Sequence[MicroBatch]) -> None:
        """Run all operations. Without gradients the plan must have forward passes only."""
        self._messages.clear()
        for stage in self._stages.values():
            stage.begin_step(len(micro_batches))
        for operation in self._plan:
            if isinstance(operation, Receive):
                self._messages.receive(operation.message, operation.peer)
            elif isinstance(operation, Send):
                self._messages.send(operation.message, operation.peer)
            elif isinstance(operation, Release):
                self._messages.release(operation.message)
            elif self._pairs is not None and len(operation) == 2:
                self._run_pair(operation, micro_batches, self._pairs)
            else:
                for action in operation:
                    self._run_action(action, micro_batches)
        assert self._messages.is_empty, "a plan consumes and releases every message"

    def _run_action(self, action: Action, micro_batches: Sequence[MicroBatch]) -> None:
        stage = self._stages[action.stage]
        number = action.micro_batch
        if self._pairs is not None:
            self._pairs.record(action)
        if action.kind == "W":
            with self._comm_timer.working():
                stage.backward_weights(number)
            return
        x = self._take_input(action)
        if action.kind == "F":
            tokens, keywords = micro_batches[number]
            with self._comm_timer.working():
                self._put_output(action, stage.forward(number, tokens if x is None else x, keywords))
            return
        with self._comm_timer.working():
            self._put_output(action, stage.backward(number, x, delays_weights=action.kind == "I"))

    def _run_pair(self, slot: Slot, micro_batches: Sequence[MicroBatch], pairs: "OverlappedPairs") -> None:
        """Run a forward pass during a backward pass. The inputs of both are received before."""
        forward, backward = slot
        stage = self._stages[forward.stage]
        x = self._take_input(forward)
        gradient = self._take_input(backward)
        tokens, keywords = micro_batches[forward.micro_batch]
        x = tokens if x is None else x
        pairs.record(forward, backward)
        with self._comm_timer.working():
            task = stage.begin_forward(x, keywords)
            with pairs.backward_overlap.backward(task):
                passed = self._stages[backward.stage].backward(backward.micro_batch, gradient, delays_weights=False)
            self._put_output(backward, passed)
            self._put_output(forward, stage.finish_forward(forward.micro_batch, x, task.run_to_end()))

    def _take_input(self, action: Action) -> Tensor | None:
        message = received(action, self._num_stages)
        return None if message is None else self._messages.take(message)

    def _put_output(self, action: Action, output: Tensor | None) -> None:
        if output is not None:
            self._messages.put(action.produces, output)


class OverlappedPairs:
    """The overlap of the two passes of a slot, and the phases of resumable stages, which have no hooks for them."""

    def __init__(self, backward_overlap: BackwardOverlap, recorder: FlightRecorder) -> None:
        self.backward_overlap = backward_overlap
        self._recorder = recorder

    def record(self, *actions: Action) -> None:
        """Record the actions of a slot as a phase of the step. Without gradients, the caller names the phase."""
        if not torch.is_grad_enabled():
            return
        passes = [
            f"{PASSES[action.kind]} of micro-batch {action.micro_batch} in stage {action.stage}" for action in actions
        ]
        self._recorder.set_phase(" overlapped with ".join(passes))
