"""`step_time_s` is the time from the load of the batch to the update of the weights, and nothing after it."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import moefold
from moefold.comm.flight_recorder import FlightRecorder
from moefold.comm.groups import ParallelGroups
from moefold.config.schema import Config
from moefold.data.dataset import ProgramData
from moefold.data.sample import Sample
from moefold.data.sampler import Sampler
from moefold.train.signals import StopSignals
from moefold.train.trainer import Trainer
from moefold.validate.config import check_config
from tests.moved_clock import MovedClock
from tests.train.tiny_runs import recipe, records

pytestmark = pytest.mark.parity

LOAD_S, LOSS_S, CALLBACK_S = 1.0, 10.0, 1000.0
BATCH, MICRO_BATCH = 4, 2


class SlowSamples(Sampler):
    """Samples that each take a second to load."""

    seq_len = 16
    has_annotations = True

    def __init__(self, clock: MovedClock) -> None:
        self.clock = clock

    def __len__(self) -> int:
        return 64

    def annotated_sample(self, index: int) -> Sample:
        self.clock.move(LOAD_S)
        return Sample(torch.arange(index, index + self.seq_len + 1).numpy() % 32)


class SlowLoss(moefold.NextTokenLoss):
    """The loss of next tokens, which takes ten seconds for a micro-batch."""

    clock: MovedClock

    def __call__(self, output, columns):
        self.clock.move(LOSS_S)
        return super().__call__(output, columns)


class SlowCallback(moefold.Callback):
    """Callback that takes a thousand seconds before the metrics are written, and as long after the step."""

    def __init__(self, clock: MovedClock) -> None:
        self.clock = clock

    def measure(self, context, step):
        self.clock.move(CALLBACK_S)
        return {}

    def after_step(self, context, step):
        self.clock.move(CALLBACK_S)


def _train(cfg: Config) -> None:
    clock = MovedClock()
    recorder = FlightRecorder()
    recorder.clock = clock
    loss = SlowLoss()
    object.__setattr__(loss, "clock", clock)
    groups = ParallelGroups.create(check_config(cfg), torch.device("cpu"), recorder)
    data = ProgramData(SlowSamples(clock), validation=SlowSamples(clock))
    Trainer(cfg, groups, loss=loss, data=data, callbacks=[SlowCallback(clock)]).run(StopSignals())


def test_it_covers_load_and_micro_batches_but_no_evaluation(pool, tmp_path: Path):
    train = {"seq_len": 16, "global_batch_size": BATCH, "micro_batch_size": MICRO_BATCH, "eval_every": 1}
    cfg = recipe(tmp_path, 3, train=train)
    pool.run(1, _train, replace(cfg, data=replace(cfg.data, kind="program")))
    expected_s = BATCH * LOAD_S + BATCH / MICRO_BATCH * LOSS_S
    for record in records(tmp_path):
        assert record["step_time_s"] == pytest.approx(expected_s)
        assert record["tokens_per_s"] == pytest.approx(BATCH * 16 / expected_s)
        assert record["eval_loss"] is not None
