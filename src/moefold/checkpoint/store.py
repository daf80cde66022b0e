"""Saving and loading through torch.distributed.checkpoint: one entry for each logical tensor, whatever the mapping."""

import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

from moefold.checkpoint.folder import (
    FORMAT,
    CheckpointMeta,
    checkpoint_folder,
    draft_path,
    read_meta,
    remove_older,
    step_path,
    write_meta,
)
from moefold.config.schema import Config
from moefold.train.optimizer import named_moments, set_step_count


def save_checkpoint(
    cfg: Config,
    parameters: Mapping[str, nn.Parameter],
    optimizer: torch.optim.Optimizer,
    *,
    step: int,
    samples: int,
    tokens: int,
    is_first_rank: bool,
) -> Path:
    """Write a complete checkpoint of the run; collective over all ranks.

    The first rank renames the finished draft, and deletes the checkpoints that the recipe does not keep.

    Returns:
        Its folder.
    """
    folder = checkpoint_folder(cfg)
    draft, final = draft_path(folder, step), step_path(folder, step)
    if is_first_rank:
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
    dcp.save(_state(parameters, optimizer), checkpoint_id=draft)
    if is_first_rank:
        write_meta(
            draft,
            CheckpointMeta(
                format=FORMAT,
                step=step,
                samples=samples,
                tokens=tokens,
                seed=cfg.run.seed,
                model=asdict(cfg.model),
                parallel=asdict(cfg.parallel),
            ),
        )
        _flush(draft)
        shutil.rmtree(final, ignore_errors=True)
        draft.rename(final)
        _flush(folder)
        remove_older(folder, cfg.checkpoint.keep)
    return final


def load_checkpoint(
    path: Path, parameters: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer
) -> CheckpointMeta:
    """Read weights and moments into this rank's shards; collective over all ranks.

    Raises:
        ConfigError: the folder is no checkpoint.
    """
    meta = read_meta(path)
    dcp.load(_state(parameters, optimizer), checkpoint_id=path)
    set_step_count(optimizer, meta.step)
    return meta


def _state(parameters: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    weights = {f"model.{name}": parameter.data for name, parameter in parameters.items()}
    return weights | {f"optimizer.{name}": moment for name, moment in named_moments(optimizer, parameters).items()}


def _flush(folder: Path) -> None:
    """Bring a folder and the files in it to the disk, so that a rename never outruns its content."""
    for path in (*folder.iterdir(), folder):
        if path.is_file() or path == folder:
            handle = os.open(path, os.O_RDONLY)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)
