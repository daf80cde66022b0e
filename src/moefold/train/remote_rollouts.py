"""Rollouts from ranks that only sample: the training ranks send weights to them and receive rounds from them."""

from collections import deque
from dataclasses import dataclass

from moefold.comm.groups import ParallelGroups
from moefold.comm.trainer_sampler_link import JobLink, JobSplit, PendingObject, PendingSend
from moefold.cost.shard_boxes import WeightSharding
from moefold.parallel.parallel_model import ParallelModel
from moefold.parallel.remote_reshard import WeightSender
from moefold.rl.rollout_table import Round
from moefold.train.rollout_sampler import PromptPosition

ORDERS_TAG = 3
"""Tags of the messages of a `JobLink`: orders of training rank 0, and rounds for one training rank."""
ROUNDS_TAG = 4


@dataclass(frozen=True)
class RoundOrder:
    """Order of rounds, to sample with the weights that follow."""

    count: int
    version: int
    """Number of optimizer steps that produced the weights."""
    restart: PromptPosition | None
    """The prompts to begin with; None: the prompts after the last round."""


@dataclass(frozen=True)
class SamplingStart:
    """The first message to a sampling rank."""

    fingerprints: dict[str, str]
    """Fingerprints of the data files that the training ranks see."""


def sampling_rank_of(split: JobSplit, training_rank: int) -> int:
    """Return the rank of the job that sends a training rank its rounds."""
    return split.sampling_ranks[training_rank % split.num_sampling]


class RemoteRollouts:
    """Orders rounds from the ranks that only sample, which work while this rank trains.

    Args:
        source, target: the mappings of training and of sampling.
    """

    def __init__(
        self,
        source: WeightSharding,
        target: WeightSharding,
        groups: ParallelGroups,
        model: ParallelModel,
        link: JobLink,
        start: SamplingStart,
    ) -> None:
        self._link = link
        self._groups = groups
        self._sends: deque[tuple[int, list[PendingSend | PendingObject]]] = deque()
        self._is_first_rank = groups.rank == 0
        self.num_ordered = 0
        groups.recorder.set_phase("joining the ranks that sample")
        starts = self._to_all(start)
        self._weights = WeightSender(model, source, target, link)
        for send in starts:
            send.wait()

    def order(self, count: int, version: int, restart: PromptPosition | None) -> None:
        """Send the current weights and the order to sample with them, see `RolloutSource.order`; does not wait."""
        self._groups.recorder.set_phase("sending weights to the ranks that sample")
        orders = self._to_all(RoundOrder(count, version, restart))
        self._sends.append((version, [*orders, *self._weights.send()]))
        self.num_ordered += count

    def receive(self) -> Round:
        """Wait for the next round."""
        self._groups.recorder.set_phase("waiting for rollouts")
        received = self._link.receive_object(sampling_rank_of(self._link.split, self._groups.rank), ROUNDS_TAG)
        assert isinstance(received, Round)
        self.num_ordered -= 1
        # The weights that sampled this round have arrived, so their copies can be freed.
        while self._sends and self._sends[0][0] <= received.version:
            for send in self._sends.popleft()[1]:
                send.wait()
        return received

    def finish(self) -> None:
        """Receive the ordered rounds, and end the ranks that sample."""
        while self.num_ordered:
            self.receive()
        for send in self._to_all(None):
            send.wait()

    def _to_all(self, message: object) -> list[PendingObject]:
        """Start to send an object of training rank 0 to every sampling rank."""
        if not self._is_first_rank:
            return []
        return [self._link.send_object(message, rank, ORDERS_TAG) for rank in self._link.split.sampling_ranks]
