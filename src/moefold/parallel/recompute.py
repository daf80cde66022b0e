"""Which parts of the layers run again in the backward pass instead of being kept (`train.recompute`)."""

from collections.abc import Sequence

from moefold.model.latent_attention import LatentAttention
from moefold.model.mlp import SwiGLU
from moefold.model.recall import recalled, recomputed
from moefold.model.transformer import Block, Transformer
from moefold.moe.layer import MoELayer


def apply_recompute(stage: Transformer, parts: Sequence[str]) -> None:
    """Let those parts of every layer of a stage forget; after the axes are applied and before FSDP.

    Communication inside a part runs again too: on all ranks alike, because all run the same graph backwards. Nothing
    else changes: routing, drops and noise follow from tokens and places, loads are kept by micro-batch, and what a step
    counts is counted when a gradient passes, once.
    """
    for block in stage.layers.values():
        assert isinstance(block, Block)
        for part in parts:
            _forget(block, part)


def _forget(block: Block, part: str) -> None:
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
            ffn.forward = recomputed(ffn.forward)  # type: ignore[method-assign]
        case "shared_experts" if isinstance(ffn, MoELayer) and ffn.shared is not None:
            ffn.shared.forward = recomputed(ffn.shared.forward)
        case "expert_activation" if isinstance(ffn, MoELayer):
            ffn.experts.keeps_inner = False
        case "layer":
            block.forward = recomputed(block.forward)  # type: ignore[method-assign]
