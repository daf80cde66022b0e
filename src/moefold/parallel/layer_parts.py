"""Parts of a layer that can be recomputed or offloaded as a whole (`train.recompute`, `train.offload`)."""

from moefold.model.attention import SelfAttention
from moefold.model.mlp import SwiGLU
from moefold.model.module_wrapper import Wrapper, wrap_method
from moefold.model.moe.layer import MoELayer
from moefold.model.transformer import Block, Transformer


def forward_method(stage: Transformer) -> str:
    """Return the method that runs the stage, its layers and its MoE layers: the resumable one if passes overlap."""
    return "forward_resumable" if stage.cfg.parallel.overlap_experts else "forward"


def wrap_part(stage: Transformer, part: str, wrapper: Wrapper) -> None:
    """Wrap the method that computes a part, in every layer of a stage that has the part."""
    for block in stage.layers.values():
        assert isinstance(block, Block)
        ffn = block.ffn
        match part:
            case "layer":
                wrap_method(block, forward_method(stage), wrapper)
            case "norms":
                wrap_method(block, "norm_checkpoint", wrapper)
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
