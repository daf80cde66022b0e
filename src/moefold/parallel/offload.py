"""What waits outside of the device: activations of parts of the layers (`train.offload`), and moments."""

import math
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from moefold.config.schema import TrainConfig
from moefold.model.mlp import SwiGLU
from moefold.model.moe.layer import MoELayer
from moefold.model.transformer import Block, Transformer
from moefold.offload.activations import GIB, ActivationOffload
from moefold.offload.backend import CopyEngine, HostMemory
from moefold.offload.ssd import SsdFile
from moefold.optim.state_offload import MmapStore, PinnedStore, StateStore


def open_offload(train: TrainConfig, device: torch.device, rank: int) -> ActivationOffload | None:
    """The hooks and the place that the recipe asks for; None if it offloads nothing.

    Raises:
        ConfigError: there can be no file in `train.offload_dir` on this machine.
    """
    if not train.offload:
        return None
    link = CopyEngine(device)
    limit_bytes = train.offload_limit_gib * GIB or math.inf
    if train.offload_to == "ssd":
        tier: SsdFile | HostMemory = SsdFile(link, Path(train.offload_dir), limit_bytes)
    else:
        tier = HostMemory(link, limit_bytes)
    return ActivationOffload(
        tier, min_bytes=train.offload_min_kib * 2**10, is_synchronous=train.offload_waits, rank=rank
    )


def open_state_store(train: TrainConfig, device: torch.device) -> StateStore | None:
    """Where the moments of the optimizer live, if that is not beside the weights."""
    link = CopyEngine(device)
    min_bytes = train.offload_min_kib * 2**10
    match train.offload_optimizer:
        case "host":
            return PinnedStore(link, min_bytes)
        case "ssd":
            return MmapStore(link, Path(train.offload_dir), min_bytes)
    return None


def apply_offload(stage: Transformer, parts: Sequence[str], offload: ActivationOffload) -> None:
    """Let those parts of every layer of a stage give their activations away; behind `apply_recompute`, before FSDP.

    So a part that runs again too gives away its inputs, and a larger one around it what both keep.
    """
    for block in stage.layers.values():
        assert isinstance(block, Block)
        for part in parts:
            _offload_part(block, part, offload)

    def lasting() -> tuple[Tensor, ...]:
        return () if stage.rope is None else (stage.rope.cos, stage.rope.sin)

    stage.forward_resumable = offload.wrap_stage(stage.forward_resumable, lasting)  # type: ignore[method-assign]


def _offload_part(block: Block, part: str, offload: ActivationOffload) -> None:
    attention = block.attention
    ffn = block.ffn
    match part:
        case "norms":
            block.norm_checkpoint = offload.wrap_output_checkpoint(block.norm_checkpoint)
        case "core_attention":
            attention.core_attention = offload.wrap(attention.core_attention)
        case "dense_mlp" if isinstance(ffn, SwiGLU):
            ffn.forward = offload.wrap(ffn.forward)  # type: ignore[method-assign]
        case "moe" if isinstance(ffn, MoELayer):
            ffn.forward_resumable = offload.wrap_resumable(ffn.forward_resumable)  # type: ignore[method-assign]
        case "shared_experts" if isinstance(ffn, MoELayer) and ffn.shared is not None:
            ffn.shared.forward = offload.wrap(ffn.shared.forward)
        case "expert_activation" if isinstance(ffn, MoELayer):
            ffn.experts.forward = offload.wrap(ffn.experts.forward)  # type: ignore[method-assign]
        case "layer":
            block.forward_resumable = offload.wrap_resumable(block.forward_resumable)  # type: ignore[method-assign]
