"""Rollouts from ranks that only sample: both ends of the link between training ranks and sampling ranks.

The training ranks send weights and orders (`RemoteRollouts`). A sampling rank samples and scores rounds, and sends
their rows to the training ranks (`SamplingWorker`).
"""

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from moefold.comm.flight_recorder import FlightRecorder
from moefold.comm.groups import ParallelGroups, current_world
from moefold.comm.trainer_sampler_link import JobLink, JobSplit, PendingSend
from moefold.config.schema import Config
from moefold.cost.shard_boxes import WeightSharding
from moefold.data.fingerprint import file_sizes, size_differences
from moefold.data.prompts import open_prompts
from moefold.data.tokenizer import load_tokenizer
from moefold.errors import ConfigError
from moefold.message_text import format_list
from moefold.parallel.inference_model import InferenceModel
from moefold.parallel.parallel_model import ParallelModel
from moefold.parallel.remote_reshard import WeightReceiver, WeightSender
from moefold.rl.reward import Reward, check_columns
from moefold.rl.rollout import StepPacking, split_steps
from moefold.rl.rollout_table import Round
from moefold.rl.round_statistics import RoundStatistics
from moefold.topology.layout import Layout
from moefold.topology.rollout_mapping import rollout_config
from moefold.train.rl.rollout_sampler import PromptPosition, RoundSampler
from moefold.validate.config import check_config

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
    """The prompts to begin with. None means the prompts after the last round."""


@dataclass(frozen=True)
class SamplingStart:
    """The first message to a sampling rank."""

    fingerprints: dict[str, str]
    """Fingerprints of the data files that the training ranks see."""


def sampling_rank_of(split: JobSplit, training_rank: int) -> int:
    """Return the rank of the job that sends a training rank its rounds."""
    return split.sampling_ranks[training_rank % split.num_sampling]


def _shardings(cfg: Config) -> tuple[WeightSharding, WeightSharding]:
    """Return the sharding of the weights on the training ranks, and on the sampling ranks."""
    return (
        WeightSharding.from_config(cfg, for_training=True),
        WeightSharding.from_config(rollout_config(cfg), for_training=False),
    )


class RemoteRollouts:
    """Orders rounds from the ranks that only sample, which work while this rank trains."""

    def __init__(self, cfg: Config, model: ParallelModel, link: JobLink, start: SamplingStart) -> None:
        self._link = link
        self._groups = model.groups
        self._sends: deque[tuple[int, list[PendingSend]]] = deque()
        self._is_first_rank = self._groups.rank == 0
        self.num_ordered = 0
        self._groups.recorder.set_phase("joining the ranks that sample")
        starts = self._to_all(start)
        self._weights = WeightSender(model, *_shardings(cfg), link)
        for send in starts:
            send.wait()

    def order(self, count: int, version: int, restart: PromptPosition | None) -> None:
        """Send the current weights and the order to sample with them, see `RolloutSource.order`. It does not wait."""
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

    def _to_all(self, message: object) -> list[PendingSend]:
        """Start to send an object of training rank 0 to every sampling rank."""
        if not self._is_first_rank:
            return []
        return [self._link.send_object(message, rank, ORDERS_TAG) for rank in self._link.split.sampling_ranks]


class SamplingWorker:
    """Samples the rounds that training rank 0 orders. It is collective over the sampling ranks.

    Args:
        link: link to the training ranks, which have `RemoteRollouts`.
    """

    def __init__(
        self, cfg: Config, layout: Layout, device: torch.device, recorder: FlightRecorder, link: JobLink
    ) -> None:
        sampled = rollout_config(cfg)
        groups = ParallelGroups.create(check_config(sampled, is_training=False), device, recorder)
        self._cfg = cfg
        self._layout = layout
        self._link = link
        self._recorder = recorder
        self._recorder.set_phase("joining the ranks that train")
        self._check_data()
        tokenizer = load_tokenizer(cfg.data, vocab_size=cfg.model.vocab_size)
        assert tokenizer.separator_id is not None, "checked before the run"
        self._packing = StepPacking(cfg.parallel, cfg.train, cfg.rl, cfg.rollout, tokenizer.separator_id)
        check = check_columns(cfg.data, cfg.reward)
        self._prompts = open_prompts(cfg.data, tokenizer, seed=cfg.run.seed, check=check).train
        model = InferenceModel.build(sampled, groups)
        self._receiver = WeightReceiver(model, *_shardings(cfg), link)
        self._reward = Reward(cfg.data, cfg.faults, cfg.reward, num_ranks=cfg.num_job_ranks)
        self._sampler = RoundSampler(cfg, model, self._reward, tokenizer)
        self._position = PromptPosition(0)
        self._served = [rank for rank in link.split.training_ranks if sampling_rank_of(link.split, rank) == link.rank]
        self._sends: deque[list[PendingSend]] = deque()
        self._max_pending = cfg.rl.staleness // cfg.rl.updates + 1

    def run(self) -> None:
        """Sample until training has ended.

        Raises:
            RunError: a reward function failed.
        """
        with self._reward:
            started_s = time.perf_counter()
            while (order := self._next_order()) is not None:
                self._work(order, time.perf_counter() - started_s)
                started_s = time.perf_counter()
            self._wait_sends(0)

    def _check_data(self) -> None:
        """Check that this rank sees the data files of the training ranks."""
        start = self._link.receive_object(0, ORDERS_TAG)
        assert isinstance(start, SamplingStart)
        differences = size_differences(start.fingerprints, file_sizes(self._cfg.data))
        for rank, difference in enumerate(current_world().all_gather_object(differences)):
            if difference:
                raise ConfigError(
                    f"rank {self._link.split.sampling_ranks[rank]}, which samples, sees other data than rank 0: "
                    f"{format_list(list(difference.values()))}; give all machines the same files"
                )

    def _next_order(self) -> RoundOrder | None:
        self._recorder.set_phase("waiting for weights of the training ranks")
        order = self._link.receive_object(0, ORDERS_TAG)
        assert order is None or isinstance(order, RoundOrder)
        return order

    def _work(self, order: RoundOrder, waited_s: float) -> None:
        """Receive the weights of an order, sample its rounds and send them."""
        self._recorder.begin_step(order.version + 1, "receiving weights of the training ranks")
        self._position = order.restart or self._position
        statistics = RoundStatistics(wait_s=waited_s, reshard_s=self._receiver.receive().seconds)
        for _ in range(order.count):
            new = self._sampler.sample(self._prompts, self._position, order.version, statistics)
            self._position = replace(self._position, first=new.prompts[-1] + 1)
            self._recorder.set_phase("sending rollouts to the training ranks")
            self._wait_sends(self._max_pending - 1)
            self._sends.append([self._link.send_object(sent, rank, ROUNDS_TAG) for rank, sent in self._for_ranks(new)])
            statistics = RoundStatistics()

    def _for_ranks(self, round_: Round) -> Iterator[tuple[int, Round]]:
        """Yield each training rank with its part of a round: its rows, and on the first rank also the groups."""
        assert round_.groups is not None
        steps = split_steps(round_.groups, self._cfg.rl.updates)
        metrics = tuple(round_.statistics.metrics(groups) for groups in steps)
        for rank in self._served:
            dp_rank = self._layout.attention.coordinate(rank, "dp")
            rows = tuple(self._packing.rows(groups, dp_rank) for groups in steps)
            yield rank, replace(round_, groups=round_.groups if rank == 0 else None, steps=rows, metrics=metrics)

    def _wait_sends(self, max_pending: int) -> None:
        """Wait until at most `max_pending` rounds are in flight to a training rank."""
        while len(self._sends) > max_pending:
            for send in self._sends.popleft():
                send.wait()
