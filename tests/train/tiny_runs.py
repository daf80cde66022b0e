"""Runs of a tiny model on the ranks of a pool."""

import json
from contextlib import redirect_stdout
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import torch

from moefold.comm.groups import ParallelGroups
from moefold.config.schema import Config
from moefold.config.sections.checkpoint import CheckpointConfig
from moefold.config.sections.run import RunConfig
from moefold.train.signals import StopSignals
from moefold.train.trainer import Trainer
from moefold.validate.config import check_config
from tests.verify.recipes import tiny


def recipe(
    run_dir: Path,
    steps: int,
    *,
    dtype: Any = "float64",
    every: int = 2,
    train: dict[str, Any] | None = None,
    **parallel: Any,
) -> Config:
    cfg = tiny(train={"lr_schedule": "constant", "micro_batch_size": 2} | (train or {}), **parallel)
    return replace(
        cfg,
        run=RunConfig(dir=str(run_dir), seed=3, steps=steps, device="cpu", dtype=dtype),
        checkpoint=CheckpointConfig(every=every, at_end=every > 0),
    )


def train_rank(cfg: Config) -> int:
    groups = ParallelGroups.create(check_config(cfg), torch.device("cpu"))
    return Trainer(cfg, groups).run(StopSignals())


def records(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def losses(run_dir: Path) -> list[float]:
    return [record["loss"] for record in records(run_dir)]


def printed_by_rank(cfg: Config) -> str:
    """Train, and return the output of this rank."""
    printed = StringIO()
    with redirect_stdout(printed):
        train_rank(cfg)
    return printed.getvalue()
