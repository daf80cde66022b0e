"""What waits outside of the device: activations of parts of the layers (`train.offload`), and moments."""

import math
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from moefold.config.schema import TrainConfig
from moefold.model.mlp import SwiGLU
from moefold.model.transformer import Block, Transformer
from moefold.moe.layer import MoELayer
from moefold.offload.activations import GIB, ActivationOffload
from moefold.offload.ssd import SsdFile
from moefold.offload.tier import HostMemory, Link
from moefold.parallel.moments import FileHome, HostHome, MomentHome


def open_offload(train: TrainConfig, device: torch.device, rank: int) -> ActivationOffload | None:
    """The hooks and the place that the recipe asks for; None if it offloads nothing.

    Raises:
        ConfigError: there can be no file in `train.offload_dir` on this machine.
    """
    if not train.offload:
        return None
    link, limit_bytes = Link(device), train.offload_limit_gib * GIB or math.inf
    if train.offload_to == "ssd":
        tier: SsdFile | HostMemory = SsdFile(link, Path(train.offload_dir), limit_bytes)
    else:
        tier = HostMemory(link, limit_bytes)
    return ActivationOffload(tier, min_bytes=train.offload_min_kib * 2**10, waits=train.offload_waits, rank=rank)


def open_moment_home(train: TrainConfig, device: torch.device) -> MomentHome | None:
    """Where the moments of the optimizer live, if that is not beside the weights."""
    link, min_bytes = Link(device), train.offload_min_kib * 2**10
    match train.offload_optimizer:
        case "host":
            return HostHome(link, min_bytes)
        case "ssd":
            return FileHome(link, Path(train.offload_dir), min_bytes)
    return None


def apply_offload(stage: Transformer, parts: Sequence[str], offload: ActivationOffload) -> None:
    """Let those parts of every layer of a stage give their activations away; behind `apply_recompute`, before FSDP.

    So a part that runs again too gives away its inputs, and a larger one around it what both keep.
    """
    for block in stage.layers.values():
        assert isinstance(block, Block)
        for part in parts:
            _give_away(block, part, offload)

    def lasting() -> tuple[Tensor, ...]:
        return () if stage.rotation is None else (stage.rotation.cos, stage.rotation.sin)

    stage.steps = offload.around_stage(stage.steps, lasting)  # type: ignore[method-assign]


def _give_away(block: Block, part: str, offload: ActivationOffload) -> None:
    attention, ffn = block.attention, block.ffn
    match part:
        case "norms":
            block.recall = offload.around_recall(block.recall)
        case "core_attention":
            attention.core = offload.around(attention.core)
        case "dense_mlp" if isinstance(ffn, SwiGLU):
            ffn.forward = offload.around(ffn.forward)  # type: ignore[method-assign]
        case "moe" if isinstance(ffn, MoELayer):
            ffn.steps = offload.around_steps(ffn.steps)  # type: ignore[method-assign]
        case "shared_experts" if isinstance(ffn, MoELayer) and ffn.shared is not None:
            ffn.shared.forward = offload.around(ffn.shared.forward)
        case "expert_activation" if isinstance(ffn, MoELayer):
            ffn.experts.forward = offload.around(ffn.experts.forward)  # type: ignore[method-assign]
        case "layer":
            block.steps = offload.around_steps(block.steps)  # type: ignore[method-assign]
