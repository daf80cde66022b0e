"""A rank that is slow by itself is named, whatever it shares with the others. Those that wait for it are not."""

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from moefold.comm.groups import ParallelGroups
from moefold.config.run import RunConfig
from moefold.config.schema import Config
from moefold.metrics.step_metrics import REPORT_SLOW_STEPS
from moefold.model.block import Block
from moefold.train.signals import StopSignals
from moefold.train.trainer import Trainer
from moefold.validate.config import check_config
from tests.metrics.faults import read_faults
from tests.verify.recipes import tiny

pytestmark = pytest.mark.parity

SLOW_RANK = 1
PAUSE_S = 0.08


def pause(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
    if isinstance(module, Block) and torch.distributed.get_rank() == SLOW_RANK:
        time.sleep(PAUSE_S)


def _train(cfg: Config) -> None:
    handle = torch.nn.modules.module.register_module_forward_hook(pause)
    try:
        Trainer(cfg, ParallelGroups.create(check_config(cfg), torch.device("cpu"))).run(StopSignals())
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
    cfg = replace(
        cfg, run=RunConfig(dir=str(tmp_path), seed=3, steps=REPORT_SLOW_STEPS + 4, device="cpu", dtype="float64")
    )
    pool.run(4, _train, cfg)
    (named,) = read_faults(tmp_path)
    assert (named["kind"], named["rank"]) == ("straggler", SLOW_RANK)
    assert REPORT_SLOW_STEPS <= named["step"] <= cfg.run.steps
    assert named["own_s"] - named["median_s"] > PAUSE_S
    lines = [json.loads(line)["rank_times"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    # In a single step another one may have been the slowest in truth: the system did not run it for a while.
    assert [line["slowest_rank"] for line in lines[1:]].count(SLOW_RANK) >= REPORT_SLOW_STEPS
    # The others wait for it about as long as it pauses, and it for nobody.
    late = sorted(line["wait_median_s"] - line["wait_min_s"] for line in lines)[len(lines) // 2]
    assert late > PAUSE_S / 2
