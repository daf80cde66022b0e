"""Activation recomputation (`train.recompute`): which parts of the layers are recomputed in the backward pass."""

from collections.abc import Sequence
from functools import partial

import torch

from moefold.comm.collectives import all_reduce_max
from moefold.comm.groups import ParallelGroups
from moefold.comm.resumable import BackwardOverlap
from moefold.config.schema import Config
from moefold.config.sections.train import AUTO_RECOMPUTE
from moefold.model.activation_checkpoint import checkpoint_resumable, checkpoint_without_output, checkpoint_wrapper
from moefold.model.attention import SelfAttention
from moefold.model.block import Block
from moefold.model.mlp import SwiGLU
from moefold.model.module_wrapper import Wrapper, set_on_modules, wrap_method
from moefold.model.moe.layer import MoELayer
from moefold.model.transformer import Transformer
from moefold.units import GIB


def resolve_recompute(cfg: Config, groups: ParallelGroups, device_bytes: int) -> tuple[Config, str]:
    """Resolve `train.recompute = ["auto"]`, with a log line that gives the reason. Other values are returned unchanged.

    Ranks that recompute different parts would deadlock in their collectives, so all must choose the same. Without a
    budget in the recipe the smallest device decides: an all-reduce over the world.

    Args:
        cfg: a recipe that `check_memory_device` passed.
        device_bytes: memory of this rank's device, or 0 on the CPU, which needs a budget.

    Raises:
        ConfigError: nothing fits, on all ranks.
    """
    if AUTO_RECOMPUTE not in cfg.train.recompute:
        return cfg, ""
    # The memory formula. The other values of train.recompute need none.
    from moefold.cost.auto_recompute import DEFAULT_MEMORY_FRACTION, choose_recompute, with_recompute
    from moefold.cost.saved_tensors import KERNEL_PROFILES

    budget_bytes = round(cfg.train.memory_budget_gib * GIB)
    if not budget_bytes:
        smallest = -all_reduce_max(torch.tensor(-device_bytes, device=groups.device), groups.world)
        budget_bytes = round(DEFAULT_MEMORY_FRACTION * int(smallest))
        assert budget_bytes, "a CPU needs a budget"
    choice = choose_recompute(cfg, budget_bytes, KERNEL_PROFILES[groups.device.type])
    return with_recompute(cfg, choice.parts), choice.describe(budget_bytes)


def device_memory(device: torch.device) -> int:
    """Return the memory of a GPU in bytes, or 0 for a CPU, whose memory is not divided among ranks."""
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else 0


def apply_recompute(stage: Transformer, parts: Sequence[str], backward_overlap: BackwardOverlap | None = None) -> None:
    """Checkpoint these parts of every layer of a stage. Call it after the axes are applied and before FSDP.

    The forward pass of `backward_overlap` is also resumed while a part is recomputed.

    All ranks repeat the communication inside a part, as all run the same graph backwards. Nothing else changes:
    routing, token drop and noise are functions of tokens and positions, expert loads are stored by micro-batch, and
    step statistics are counted once, when a gradient passes.
    """
    on_yield = (backward_overlap or BackwardOverlap()).resume
    for part in parts:
        match part:
            case "expert_activation":
                set_on_modules(stage, "saves_fc1", False)
            case "moe" | "layer":
                wrap_part(stage, part, partial(checkpoint_resumable, on_yield=on_yield))
            case "core_attention" | "dense_mlp" | "shared_experts":
                wrap_part(stage, part, checkpoint_wrapper)
            case _:
                set_on_modules(stage, f"{part}_checkpoint", checkpoint_without_output)


def forward_method(stage: Transformer) -> str:
    """Return the method that runs the stage, its layers and its MoE layers: the resumable one if passes overlap."""
    return "forward_resumable" if stage.settings.overlaps_experts else "forward"


def wrap_part(stage: Transformer, part: str, wrapper: Wrapper) -> None:
    """Wrap the method that computes a part, in every layer of a stage that has the part."""
    for block in stage.layers.values():
        assert isinstance(block, Block)
        ffn = block.ffn
        match part:
            case "layer":
                wrap_method(block, forward_method(stage), wrapper)
            case "norms":
                wrap_method(block, "norms_checkpoint", wrapper)
            case "core_attention" if isinstance(block.attention, SelfAttention):
                wrap_method(block.attention, "core_attention", wrapper)
            case "dense_mlp" if isinstance(ffn, SwiGLU):
                wrap_method(ffn, "forward", wrapper)
            case "moe" if isinstance(ffn, MoELayer):
                wrap_method(ffn, forward_method(stage), wrapper)
            case "shared_experts" if isinstance(ffn, MoELayer) and ffn.shared is not None:
                wrap_method(ffn.shared, "forward", wrapper)
            case "expert_activation" if isinstance(ffn, MoELayer):
                wrap_method(ffn.experts, "forward", wrapper)
