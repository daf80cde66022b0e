"""Resharding in memory to ranks that only sample: they receive the weights of the ranks that train, box by box.

The plan is as in `parallel/reshard.py`, but between disjoint ranks. A training rank copies the boxes that it sends, in
the dtype of the target, and trains on while they are in flight. A sampling rank receives them when it begins to sample,
in buckets of bounded bytes. See docs/design/025-asynchronous-reinforcement-learning.md.
"""

import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from moefold.comm.box_exchange import MAX_SCRATCH_BYTES
from moefold.comm.groups import World, current_world
from moefold.comm.reshard_plan import BoxTransfer, ReshardPlan, plan_reshard
from moefold.comm.trainer_sampler_link import JobLink, PendingSend
from moefold.cost.shard_boxes import WeightSharding
from moefold.model.local_param import local_tensor
from moefold.parallel.fsdp import reshard_parameters
from moefold.parallel.inference_model import InferenceModel
from moefold.parallel.parallel_model import ParallelModel
from moefold.parallel.reshard import check_boxes, gather_dtypes, merged_shards, weight_tensors

DTYPES_TAG = 1
"""Tags of the messages of a `JobLink`: the dtypes of the target, and its weights."""
WEIGHTS_TAG = 2


@dataclass(frozen=True)
class _Message:
    """The boxes of one bucket that one rank sends to another, in one message."""

    source: int
    target: int
    transfers: tuple[BoxTransfer, ...]
    num_bytes: int


class _TransferPlan:
    """The messages of a transfer, the same on every rank."""

    def __init__(
        self,
        source: WeightSharding,
        target: WeightSharding,
        dtypes: dict[str, torch.dtype],
        link: JobLink,
        max_bucket_bytes: int,
    ) -> None:
        itemsize = {name: dtype.itemsize for name, dtype in dtypes.items()}
        self._itemsize = itemsize
        self.dtypes = dtypes
        self.source = source
        self.target = target
        self.plan: ReshardPlan = plan_reshard(
            self.source, self.target, itemsize, max_bucket_bytes, first_target=link.split.num_training
        )

    def buckets(self) -> Iterator[list[_Message]]:
        """Yield the messages of each bucket, in the order of sources and targets."""
        for transfers in self.plan.buckets:
            by_pair: dict[tuple[int, int], list[BoxTransfer]] = defaultdict(list)
            for transfer in transfers:
                by_pair[transfer.source, transfer.target].append(transfer)
            yield [
                _Message(source, target, tuple(pieces), sum(p.box.numel * self._itemsize[p.name] for p in pieces))
                for (source, target), pieces in sorted(by_pair.items())
            ]

    def views(self, message: _Message, buffer: Tensor) -> Iterator[tuple[BoxTransfer, Tensor]]:
        """Yield the boxes of a message with the views of its buffer."""
        first = 0
        for transfer in message.transfers:
            size = transfer.box.numel * self._itemsize[transfer.name]
            yield transfer, buffer[first : first + size].view(self.dtypes[transfer.name]).view(transfer.box.size)
            first += size


class WeightSender:
    """Sends the weights of a model in training to the ranks that sample.

    Args:
        link: link to the ranks that sample, which have a `WeightReceiver`. The constructor waits for theirs.
        max_bucket_bytes: maximum bytes that a sampling rank receives in one bucket.
    """

    def __init__(
        self,
        model: ParallelModel,
        source: WeightSharding,
        target: WeightSharding,
        link: JobLink,
        max_bucket_bytes: int = MAX_SCRATCH_BYTES,
    ) -> None:
        self._model = model
        self._link = link
        dtypes = link.receive_object(link.split.sampling_ranks[0], DTYPES_TAG)
        self._transfer = _TransferPlan(source, target, dtypes, link, max_bucket_bytes)
        self._boxes = self._transfer.source.boxes(link.rank)
        check_boxes(weight_tensors(model), self._boxes)
        self._sent_messages = [m for bucket in self._transfer.buckets() for m in bucket if m.source == link.rank]

    @property
    def sent_bytes(self) -> int:
        """Bytes that this rank sends for each version of the weights. They are in host memory until received."""
        return sum(message.num_bytes for message in self._sent_messages)

    @torch.no_grad()
    def send(self) -> list[PendingSend]:
        """Copy the weights that the sampling ranks need from this rank, and start to send them.

        It does not communicate. With adapters it is collective over a pipeline stage, whose ranks gather the adapters.
        """
        # A gathered parameter is not a shard.
        reshard_parameters(self._model.stages)
        weights = merged_shards(self._model)
        sends = []
        for message in self._sent_messages:
            buffer = torch.empty(message.num_bytes, dtype=torch.uint8)
            for transfer, view in self._transfer.views(message, buffer):
                view.copy_(weights[transfer.name][transfer.box.index_in(self._boxes[transfer.name])])
            sends.append(self._link.send(buffer, message.target, WEIGHTS_TAG))
        return sends


@dataclass(frozen=True)
class ReceivedWeights:
    """Bytes and time of one version of the weights on this rank."""

    received_bytes: int
    scratch_bytes: int
    """Largest memory of the buffers of a bucket."""
    seconds: float


class WeightReceiver:
    """Receives the weights of the model that samples. It is collective over the sampling ranks.

    Args:
        max_bucket_bytes: maximum bytes that this rank receives in one bucket.
    """

    def __init__(
        self,
        model: InferenceModel,
        source: WeightSharding,
        target: WeightSharding,
        link: JobLink,
        max_bucket_bytes: int = MAX_SCRATCH_BYTES,
    ) -> None:
        self._model = model
        self._link = link
        world: World = current_world()
        dtypes = gather_dtypes(weight_tensors(model), world)
        self._sends = []
        if world.is_rank0:
            self._sends = [link.send_object(dtypes, rank, DTYPES_TAG) for rank in link.split.training_ranks]
        self._transfer = _TransferPlan(source, target, dtypes, link, max_bucket_bytes)
        self._boxes = self._transfer.target.boxes(link.rank - link.split.num_training)
        check_boxes(weight_tensors(model), self._boxes)
        self._buckets = [
            moves for bucket in self._transfer.buckets() if (moves := [m for m in bucket if m.target == link.rank])
        ]

    @torch.no_grad()
    def receive(self) -> ReceivedWeights:
        """Wait for the next version of the weights, and write it to the model. It is collective over sampling ranks."""
        with self._model.writing_weights():
            return self._receive()

    def _receive(self) -> ReceivedWeights:
        started_s = time.perf_counter()
        weights = {name: local_tensor(tensor) for name, tensor in weight_tensors(self._model).items()}
        received_bytes = scratch_bytes = 0
        for messages in self._buckets:
            buffers = [torch.empty(message.num_bytes, dtype=torch.uint8) for message in messages]
            pending = [
                self._link.receive_later(buffer, message.source, WEIGHTS_TAG)
                for message, buffer in zip(messages, buffers, strict=True)
            ]
            for message, buffer, receive in zip(messages, buffers, pending, strict=True):
                receive.wait()
                for transfer, view in self._transfer.views(message, buffer):
                    weights[transfer.name][transfer.box.index_in(self._boxes[transfer.name])].copy_(view)
            bucket_bytes = sum(message.num_bytes for message in messages)
            received_bytes += bucket_bytes
            scratch_bytes = max(scratch_bytes, bucket_bytes)
        return ReceivedWeights(received_bytes, scratch_bytes, time.perf_counter() - started_s)
