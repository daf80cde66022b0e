"""Which parts of the layers run again in the backward pass instead of being kept (`train.recompute`)."""

from collections.abc import Sequence

import torch

from moefold.config.checks_recompute import AUTO
from moefold.config.schema import Config
from moefold.metrics.kept_parts import KERNELS
from moefold.metrics.recompute_choice import DEVICE_SHARE, GIB, choose_recompute, with_choice
from moefold.model.latent_attention import LatentAttention
from moefold.model.mlp import SwiGLU
from moefold.model.recall import recalled, recomputed, recomputed_steps
from moefold.model.transformer import Block, Transformer
from moefold.moe.layer import MoELayer
from moefold.parallel.beside import Beside
from moefold.parallel.collectives import all_reduce_max
from moefold.parallel.groups import ParallelGroups


def settle_recompute(cfg: Config, groups: ParallelGroups, device_bytes: int) -> tuple[Config, str]:
    """What `train.recompute = ["auto"]` stands for, and a line that says why; others stay as they are.

    Ranks that made different parts again would wait for each other's exchanges for ever, so all must come to the same
    answer. Without a budget in the recipe they agree on the smallest device: collective then, over the world.

    Args:
        cfg: a recipe that `check_memory_device` passed.
        groups: of its mapping.
        device_bytes: memory of this rank's device; 0 on the CPU, which needs a budget.

    Raises:
        ConfigError: nothing fits, on all ranks.
    """
    if AUTO not in cfg.train.recompute:
        return cfg, ""
    budget_bytes = round(cfg.train.memory_budget_gib * GIB)
    if not budget_bytes:
        smallest = -all_reduce_max(torch.tensor(-device_bytes, device=groups.device), groups.world)
        budget_bytes = round(DEVICE_SHARE * int(smallest))
        assert budget_bytes, "a CPU has a budget"
    choice = choose_recompute(cfg, budget_bytes, KERNELS[groups.device.type])
    return with_choice(cfg, choice.parts), choice.words(budget_bytes)


def memory_of(device: torch.device) -> int:
    """Bytes of a GPU; 0 of a CPU, whose memory belongs to no rank."""
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else 0


def apply_recompute(stage: Transformer, parts: Sequence[str], beside: Beside | None = None) -> None:
    """Let those parts of every layer of a stage forget; after the axes are applied and before FSDP.

    What is beside a backward pass goes on at the pauses of what runs again, too.

    Communication inside a part runs again too: on all ranks alike, because all run the same graph backwards. Nothing
    else changes: routing, drops and noise follow from tokens and places, loads are kept by micro-batch, and what a step
    counts is counted when a gradient passes, once.
    """
    for block in stage.layers.values():
        assert isinstance(block, Block)
        for part in parts:
            _forget(block, part, beside or Beside())


def _forget(block: Block, part: str, beside: Beside) -> None:
    attention, ffn = block.attention, block.ffn
    match part:
        case "norms":
            block.recall = recalled
        case "core_attention":
            attention.core = recomputed(attention.core)
        case "mla_up":
            assert isinstance(attention, LatentAttention)
            attention.recall = recalled
        case "dense_mlp" if isinstance(ffn, SwiGLU):
            ffn.forward = recomputed(ffn.forward)  # type: ignore[method-assign]
        case "moe" if isinstance(ffn, MoELayer):
            ffn.steps = recomputed_steps(ffn.steps, beside.go_on)  # type: ignore[method-assign]
        case "shared_experts" if isinstance(ffn, MoELayer) and ffn.shared is not None:
            ffn.shared.forward = recomputed(ffn.shared.forward)
        case "expert_activation" if isinstance(ffn, MoELayer):
            ffn.experts.keeps_inner = False
        case "layer":
            block.steps = recomputed_steps(block.steps, beside.go_on)  # type: ignore[method-assign]
