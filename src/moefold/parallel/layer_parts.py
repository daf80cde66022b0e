"""Parts of a layer that can be recomputed or offloaded as a whole (`train.recompute`, `train.offload`)."""

from collections.abc import Iterator

from moefold.model.mlp import SwiGLU
from moefold.model.module_wrapper import Wrapper, wrap_method
from moefold.model.moe.layer import MoELayer
from moefold.model.transformer import Block, Transformer


def blocks_of(stage: Transformer) -> Iterator[Block]:
    """Iterate over the layers of a stage."""
    for block in stage.layers.values():
        assert isinstance(block, Block)
        yield block


def wrap_part(block: Block, part: str, wrapper: Wrapper) -> None:
    """Wrap the method of a layer that computes a part; does nothing in a layer without the part."""
    ffn = block.ffn
    match part:
        case "core_attention":
            wrap_method(block.attention, "core_attention", wrapper)
        case "dense_mlp" if isinstance(ffn, SwiGLU):
            wrap_method(ffn, "forward", wrapper)
        case "moe" if isinstance(ffn, MoELayer):
            wrap_method(ffn, "forward_resumable", wrapper)
        case "shared_experts" if isinstance(ffn, MoELayer) and ffn.shared is not None:
            wrap_method(ffn.shared, "forward", wrapper)
        case "expert_activation" if isinstance(ffn, MoELayer):
            wrap_method(ffn.experts, "forward", wrapper)
        case "layer":
            wrap_method(block, "forward", wrapper)
            wrap_method(block, "forward_resumable", wrapper)
