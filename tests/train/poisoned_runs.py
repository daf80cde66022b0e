"""Runs on tokens; one token makes a sample NaN."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from moefold.checkpoint.stored_tensors import differing_tensors
from moefold.config.schema import Config
from moefold.config.sections.checkpoint import CheckpointConfig
from moefold.config.sections.data import DataConfig
from moefold.config.sections.faults import FaultsConfig
from moefold.config.sections.run import RunConfig
from moefold.model.transformer import Embedding
from moefold.validate.config import check_config
from tests.verify.recipes import tiny

SEQ_LEN, BATCH = 16, 4
POISON = 31
"""A token that makes all that is computed of its sample NaN."""
POISONED_ROW = 3 * BATCH + 2
"""Third sample of the fourth batch: with dp = 2, the second replica reads it."""


def write_tokens(path: Path, *, lacks: tuple[int, ...] = (), poisoned: tuple[int, ...] = (POISONED_ROW,)) -> Path:
    """Rows of tokens below POISON, whose first is always 0: a row may be taken out and no other one changes."""
    rows = np.random.default_rng(7).integers(1, POISON, size=(16 * BATCH, SEQ_LEN), dtype=np.uint16)
    rows[:, 0] = 0
    rows[list(poisoned), 5] = POISON
    np.save(path, np.append(np.delete(rows, lacks, axis=0).reshape(-1), np.uint16(0)))
    return path


def recipe(run_dir: Path, data: Path, steps: int, faults: dict[str, Any], **parallel: object) -> Config:
    cfg = tiny(
        model={"ffn.moe.router.expert_bias": True, "ffn.moe.router": "sigmoid"},
        moe={"bias_update_rate": 0.05, "aux_kind": "last_global_batch"},
        train={
            "lr_schedule": "constant",
            # Each replica has a sample, and a pipeline several micro-batches.
            "micro_batch_size": 2 if parallel.get("world_size", 1) <= 2 and "pp" not in parallel else 1,
            "global_batch_size": BATCH,
            "seq_len": SEQ_LEN,
        },
        **parallel,
    )
    cfg = replace(
        cfg,
        run=RunConfig(dir=str(run_dir), seed=3, steps=steps, device="cpu", dtype="float64"),
        data=DataConfig(kind="tokens", path=str(data), shuffle=False, validation_fraction=0.0),
        checkpoint=CheckpointConfig(every=2),
        faults=FaultsConfig(**faults),
    )
    check_config(cfg)
    return cfg


def poison(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> Any:
    if isinstance(module, Embedding) and bool((inputs[0] == POISON).any()):
        return output * math.nan
    return output


def last_checkpoint(run_dir: Path) -> Path:
    return sorted((run_dir / "checkpoints").glob("step-*"))[-1]


def farthest(run_dir: Path, other: Path) -> float:
    """Largest difference of a weight, a buffer or a moment."""
    found = differing_tensors(last_checkpoint(run_dir), last_checkpoint(other))
    assert all(difference.max_abs is not None for difference in found)
    return max((difference.max_abs or 0.0 for difference in found), default=0.0)
