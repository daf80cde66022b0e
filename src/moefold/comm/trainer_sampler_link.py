"""Messages between the ranks of a job that train and the ranks that only sample rollouts.

Each of the two sets of ranks has its own default process group, so that its code sees only its ranks. `JobLink` is one
more group over all ranks of the job, for messages from one rank to another. It uses gloo and host memory on every
device: a send is in flight while the sender continues, and no GPU kernel waits for a receiver that samples.
"""

import pickle
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moefold.comm.flight_recorder import FlightRecorder

MESSAGE_TIMEOUT = timedelta(days=30)
"""Longest wait for a message. A round of rollouts may take longer than `faults.timeout_s`. The watchdog finds ranks
that make no progress."""


@dataclass(frozen=True)
class JobSplit:
    """Ranks of a job: the first ranks train, the other ranks only sample rollouts."""

    num_training: int
    num_sampling: int

    @property
    def num_ranks(self) -> int:
        """Ranks of the job."""
        return self.num_training + self.num_sampling

    @property
    def training_ranks(self) -> range:
        """Ranks of the job that train."""
        return range(self.num_training)

    @property
    def sampling_ranks(self) -> range:
        """Ranks of the job that sample."""
        return range(self.num_training, self.num_ranks)

    def samples(self, rank: int) -> bool:
        """Return whether a rank of the job samples."""
        return rank >= self.num_training

    def ranks_like(self, rank: int) -> range:
        """Return the ranks of the job with the same work as `rank`. They share a default process group."""
        return self.sampling_ranks if self.samples(rank) else self.training_ranks


class JobLink:
    """Point-to-point messages between the ranks of a job. Messages of one tag from one rank arrive in their order.

    Args:
        rank: rank of this process in the job.
        handle: process group of all ranks of the job, see `connect`.
    """

    def __init__(self, split: JobSplit, rank: int, handle: Any) -> None:
        self.split = split
        self.rank = rank
        self.recorder = FlightRecorder()
        """Records the rank for whose messages this rank waits. The recorder of the run replaces it."""
        self._handle = handle

    @classmethod
    def connect(cls, split: JobSplit, rank: int, store: dist.Store) -> "JobLink":
        """Connect all ranks of the job. It is collective over them, without a timeout.

        Args:
            rank: rank of this process in the job.
        """
        handle = dist.ProcessGroupGloo(dist.PrefixStore("job link", store), rank, split.num_ranks, MESSAGE_TIMEOUT)
        return cls(split, rank, handle)

    def send(self, x: Tensor, target: int, tag: int) -> "PendingSend":
        """Start to send a contiguous, non-empty tensor in host memory, which must not change until the send is done."""
        return PendingSend([(self._handle.send([x], target, tag), x)])

    def receive(self, x: Tensor, source: int, tag: int) -> None:
        """Wait for a tensor of the shape and dtype of `x`, in host memory, and write it there."""
        self.receive_later(x, source, tag).wait()

    def receive_later(self, x: Tensor, source: int, tag: int) -> dist.Work:
        """Start to receive into `x`, see `receive`."""
        return self._handle.recv([x], source, tag)

    def send_object(self, value: Any, target: int, tag: int) -> "PendingSend":
        """Start to send an object, which is pickled immediately."""
        content = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        messages = (torch.tensor([len(content)]), content)
        return PendingSend([(self._handle.send([x], target, tag), x) for x in messages])

    def receive_object(self, source: int, tag: int) -> Any:
        """Wait for an object."""
        size = torch.empty(1, dtype=torch.int64)
        self.recorder.awaited_rank = source
        try:
            self.receive(size, source, tag)
        finally:
            self.recorder.awaited_rank = None
        content = torch.empty(int(size), dtype=torch.uint8)
        self.receive(content, source, tag)
        # From a process of the same job, as with `World.all_gather_object`.
        return pickle.loads(content.numpy().tobytes())


class PendingSend:
    """Sends of a tensor or object that may be in flight. It keeps the sent tensors."""

    def __init__(self, sends: list[tuple[dist.Work, Tensor]]) -> None:
        self._sends = sends

    def wait(self) -> None:
        """Wait until everything is received, and release the tensors."""
        while self._sends:
            self._sends[0][0].wait()
            del self._sends[0]
