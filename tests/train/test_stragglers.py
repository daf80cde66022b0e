"""Test that a slow rank is named, whatever it shares with others, and that ranks that wait for it are not."""

import fcntl
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from moefold.comm.comm_timer import CommTimer
from moefold.comm.groups import ParallelGroups
from moefold.config.schema import Config
from moefold.config.sections.run import RunConfig
from moefold.metrics.rank_times import REPORT_SLOW_STEPS
from moefold.model.block import Block
from moefold.train.signals import StopSignals
from moefold.train.trainer import Trainer
from moefold.validate.config import check_config
from tests.metrics.faults import read_faults
from tests.verify.recipes import tiny

pytestmark = pytest.mark.parity

WORLD = 4
SLOW_RANK = 1
WORK_S = 0.5
PAUSE_S = 2.0
STEPS = REPORT_SLOW_STEPS + 1


class LogicalClock:
    """Time of a rank: of the blocks that it runs, and of the slow rank's pauses, which all ranks see in one file.

    The slow rank pauses when all others wait for it, so that they cannot take its pause for work of their own.
    """

    def __init__(self, path: Path, timer: CommTimer) -> None:
        self._timer = timer
        self._rank = torch.distributed.get_rank()
        self._file = path.open("rb")
        self._paused_s = np.memmap(path, np.float64, "r+", shape=(1,))
        self._is_waiting = np.memmap(path, np.bool_, "r+", offset=8, shape=(WORLD,))
        self._worked_s = 0.0

    def __call__(self) -> float:
        with self._lock():
            self._is_waiting[self._rank] = self._timer.is_waiting
            return float(self._paused_s[0]) + self._worked_s

    def run_block(self) -> None:
        self._worked_s += WORK_S
        while self._rank == SLOW_RANK:
            with self._lock():
                if np.delete(self._is_waiting, SLOW_RANK).all():
                    self._paused_s += PAUSE_S
                    return
            time.sleep(0.001)

    @contextmanager
    def _lock(self) -> Iterator[None]:
        fcntl.flock(self._file, fcntl.LOCK_EX)
        yield
        fcntl.flock(self._file, fcntl.LOCK_UN)


def _train(cfg: Config) -> None:
    groups = ParallelGroups.create(check_config(cfg), torch.device("cpu"))
    timer = groups.world.comm_timer
    timer.host_clock = clock = LogicalClock(Path(cfg.run.dir) / "clock", timer)

    def after_module(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        if isinstance(module, Block):
            clock.run_block()

    handle = torch.nn.modules.module.register_module_forward_hook(after_module)
    try:
        Trainer(cfg, groups).run(StopSignals())
    finally:
        handle.remove()


MAPPINGS = [
    pytest.param({"world_size": 4, "tp": 2, "ep": 2, "train": {"global_batch_size": 2}}, id="tensor and experts"),
    pytest.param({"world_size": 4, "pp": 2, "zero": 0}, id="pipeline", marks=pytest.mark.slow),
    pytest.param({"world_size": 4, "cp": 2, "ep": 4, "zero": 3}, id="context, zero 3", marks=pytest.mark.slow),
]


@pytest.mark.parametrize("parallel", MAPPINGS)
def test_only_the_slow_rank_is_named(pool, tmp_path: Path, parallel):
    cfg = tiny(faults={"straggler_factor": 1.5}, **parallel)
    cfg = replace(cfg, run=RunConfig(dir=str(tmp_path), seed=3, steps=STEPS, device="cpu", dtype="float64"))
    (tmp_path / "clock").write_bytes(bytes(8 + WORLD))
    pool.run(WORLD, _train, cfg)
    (named,) = read_faults(tmp_path)
    assert (named["kind"], named["rank"], named["step"]) == ("straggler", SLOW_RANK, REPORT_SLOW_STEPS)
    assert named["own_s"] == named["median_s"] * (WORK_S + PAUSE_S) / WORK_S
    for line in (tmp_path / "metrics.jsonl").read_text().splitlines():
        times = json.loads(line)["rank_times"]
        assert times["slowest_rank"] == SLOW_RANK
        # The others wait for it as long as it pauses, and it for nobody.
        paused_s = times["own_max_s"] - times["own_median_s"]
        assert (times["wait_median_s"], times["wait_min_s"]) == (paused_s, 0)
