"""Saving and loading through torch.distributed.checkpoint: one entry for each logical tensor, whatever the mapping."""

import os
import pickle
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from moefold.checkpoint.folder import (
    FORMAT,
    CheckpointMeta,
    checkpoint_folder,
    draft_path,
    find_resume,
    model_sizes,
    put_in_place,
    read_meta,
    remove_older,
    sample_order,
    step_path,
    write_meta,
)
from moefold.config.schema import Config
from moefold.errors import ConfigError
from moefold.train.optimizer import named_moments, set_step_count

NAMED_FAULTS = 3
"""So many of a checkpoint's faults are spelled out."""


def agree_on_resume(cfg: Config) -> Path | None:
    """What `find_resume` says on the first rank, on every rank: a network disk may look different on another machine.

    Collective over all ranks.

    Raises:
        ConfigError: as `find_resume`, on the first rank.
    """
    found = [find_resume(cfg) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(found, src=0)
    return found[0]


def save_checkpoint(
    cfg: Config,
    parameters: Mapping[str, nn.Parameter],
    buffers: Mapping[str, Tensor],
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

    Raises:
        ConfigError: the folder cannot be written, is full, or is not the same one for all ranks.
    """
    folder = checkpoint_folder(cfg)
    draft, final = draft_path(folder, step), step_path(folder, step)
    with explained(f"the checkpoint of step {step} cannot be written to {str(folder)!r}"):
        if is_first_rank:
            shutil.rmtree(draft, ignore_errors=True)
            draft.mkdir(parents=True)
        metadata = dcp.save(_state(parameters, buffers, optimizer), checkpoint_id=draft)
        if not is_first_rank:
            return final
        if missing := _broken_files(draft, metadata):
            raise ConfigError(
                f"the checkpoint folder {str(folder)!r} lacks what other ranks wrote: {_some(missing)}; "
                "set checkpoint.dir to a folder that all machines share"
            )
        meta = CheckpointMeta(
            format=FORMAT,
            step=step,
            samples=samples,
            tokens=tokens,
            order=sample_order(cfg),
            model=model_sizes(cfg.model),
            parallel=asdict(cfg.parallel),
            dtype=cfg.run.dtype,
        )
        write_meta(draft, meta)
        _flush(draft)
        put_in_place(draft, final)
        _flush(folder)
        remove_older(folder, cfg.checkpoint.keep)
    return final


def load_checkpoint(
    path: Path,
    parameters: Mapping[str, nn.Parameter],
    buffers: Mapping[str, Tensor],
    optimizer: torch.optim.Optimizer,
) -> CheckpointMeta:
    """Read weights, buffers and moments into this rank's shards; collective over all ranks.

    Raises:
        ConfigError: the folder is no checkpoint, or lacks something that a rank needs; on every rank alike.
    """
    meta = read_meta(path)
    state = _state(parameters, buffers, optimizer)
    with explained(f"checkpoint {str(path)!r} cannot be read"):
        _refuse_incomplete(path, state)
        dcp.load(state, checkpoint_id=path)
    set_step_count(optimizer, meta.step)
    return meta


def _state(
    parameters: Mapping[str, nn.Parameter], buffers: Mapping[str, Tensor], optimizer: torch.optim.Optimizer
) -> dict[str, Tensor]:
    weights = {f"model.{name}": parameter.data for name, parameter in parameters.items()}
    weights |= {f"model.{name}": buffer for name, buffer in buffers.items()}
    return weights | {f"optimizer.{name}": moment for name, moment in named_moments(optimizer, parameters).items()}


def _refuse_incomplete(path: Path, state: Mapping[str, Tensor]) -> None:
    """Find out together what is missing: a rank that left alone would leave the others waiting for it."""
    metadata = dcp.FileSystemReader(path).read_metadata()
    faults = _broken_files(path, metadata) if dist.get_rank() == 0 else []
    for name, tensor in state.items():
        stored = metadata.state_dict_metadata.get(name)
        if not isinstance(stored, TensorStorageMetadata):
            faults.append(f"tensor {name}")
        elif stored.size != tensor.shape:
            faults.append(f"{name} of shape {list(tensor.shape)}, it has {list(stored.size)}")
    of_ranks: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(of_ranks, faults)
    if found := list(dict.fromkeys(fault for faults in of_ranks for fault in faults)):
        raise ConfigError(
            f"checkpoint {str(path)!r} is damaged, it lacks {_some(found)}; "
            "name another one with checkpoint.resume, or move it away"
        )


def refuse_broken_files(path: Path, metadata: Metadata) -> None:
    """Look for the files of a checkpoint without reading them.

    Raises:
        ConfigError: one is missing or too short.
    """
    if faults := _broken_files(path, metadata):
        raise ConfigError(f"checkpoint {str(path)!r} is damaged, it lacks {_some(faults)}")


def _broken_files(path: Path, metadata: Metadata) -> list[str]:
    """The files that should hold tensors and do not, or are too short."""
    needed_bytes: dict[str, int] = {}
    for info in (metadata.storage_data or {}).values():
        needed_bytes[info.relative_path] = max(needed_bytes.get(info.relative_path, 0), info.offset + info.length)
    return [
        f"file {name}" if not (path / name).exists() else f"the end of file {name}"
        for name, size in sorted(needed_bytes.items())
        if not (path / name).exists() or (path / name).stat().st_size < size
    ]


def _some(faults: list[str]) -> str:
    shown = ", ".join(faults[:NAMED_FAULTS])
    return shown if len(faults) <= NAMED_FAULTS else f"{shown} and {len(faults) - NAMED_FAULTS} more"


@contextmanager
def explained(failure: str) -> Iterator[None]:
    """Turn what a disk or a broken file raises into the user's error."""
    try:
        yield
    except CheckpointException as error:
        cause = next(iter(error.failures.values()))[0]
        if isinstance(cause, ConfigError):
            raise cause from None
        if not isinstance(cause, OSError | EOFError | pickle.UnpicklingError | RuntimeError | ValueError):
            raise
        raise ConfigError(f"{failure}: {_one_line(cause)}") from error
    except (OSError, EOFError, pickle.UnpicklingError) as error:
        raise ConfigError(f"{failure}: {_one_line(error)}") from error


def _one_line(error: BaseException) -> str:
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return (text or type(error).__name__).strip().splitlines()[0]


def _flush(folder: Path) -> None:
    """Bring a folder and the files in it to the disk, so that a rename never outruns its content."""
    for path in (*folder.iterdir(), folder):
        if path.is_file() or path == folder:
            handle = os.open(path, os.O_RDONLY)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)
