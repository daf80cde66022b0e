"""Offload to host memory or SSD: activations of parts of the layers (`train.offload`), and optimizer moments."""

import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from moefold.config.sections.train import TrainConfig
from moefold.model.module_wrapper import wrap_method
from moefold.model.transformer import Transformer
from moefold.offload.activations import ActivationOffload
from moefold.offload.backend import CopyEngine, HostMemory
from moefold.offload.ssd import SsdFile
from moefold.optim.state_offload import MmapStore, PinnedStore
from moefold.optim.states import StateStore
from moefold.parallel.recompute import forward_method, wrap_part
from moefold.units import GIB


def open_offload(train: TrainConfig, device: torch.device, rank: int) -> ActivationOffload | None:
    """Open the activation offload and its backend. Return None if the recipe offloads nothing.

    Raises:
        ConfigError: there can be no file in `train.offload_dir` on this machine.
    """
    if not train.offload:
        return None
    copy_engine = CopyEngine(device)
    limit_bytes = train.offload_limit_gib * GIB or math.inf
    if train.offload_to == "ssd":
        backend: SsdFile | HostMemory = SsdFile(copy_engine, Path(train.offload_dir), limit_bytes)
    else:
        backend = HostMemory(copy_engine, limit_bytes)
    return ActivationOffload(
        backend, min_bytes=train.offload_min_kib * 2**10, is_synchronous=train.offload_waits, rank=rank
    )


def open_state_store(train: TrainConfig, device: torch.device) -> StateStore | None:
    """Return the store of offloaded optimizer moments, or None if the moments stay on the device."""
    copy_engine = CopyEngine(device)
    min_bytes = train.offload_min_kib * 2**10
    match train.offload_optimizer:
        case "host":
            return PinnedStore(copy_engine, min_bytes)
        case "ssd":
            return MmapStore(copy_engine, Path(train.offload_dir), min_bytes)
    return None


def apply_offload(stage: Transformer, parts: Sequence[str], offload: ActivationOffload) -> None:
    """Offload the activations of these parts of every layer of a stage. Call it after `apply_recompute`, before FSDP.

    So a part that is also recomputed offloads its inputs, and a larger part around it the saved tensors of both.
    """
    for part in parts:
        wrap_part(stage, part, offload.wrap_output_checkpoint if part == "norms" else offload.wrap)

    def rope_tables() -> tuple[Tensor, ...]:
        return () if stage.rope is None else (stage.rope.cos, stage.rope.sin)

    wrap_method(stage, forward_method(stage), partial(offload.wrap_stage, long_lived=rope_tables))
