"""Messages of a pipeline rank: hidden states and their gradients, in memory from their allocation to their use."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from moefold.config.pipeline_action import ActionResult


class PipelineMessages:
    """Sends and receives the results of stages, all of one shape; those for a stage of this rank stay where they are.

    A sent tensor and a receive buffer are referenced until their communication is waited for on the current stream, so
    that later work of that stream may use their memory again.

    Args:
        group: the pipeline ranks.
        shape: shape of hidden states on this rank.
        dtype: dtype of hidden states and of their gradients.
        device: device of this rank.
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
        """Drop what an interrupted step has left."""
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
