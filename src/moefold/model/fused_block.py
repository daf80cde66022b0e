"""Layers that a kernel computes whole in the passes of a decoder; see `ops.decode`."""

import torch
from torch import Tensor, nn

from moefold.comm.torch_compat import has_forward_hooks
from moefold.model.attention import Attention
from moefold.model.local_param import local_param
from moefold.model.mlp import SwiGLU
from moefold.model.moe.dispatch.local import LocalDispatcher
from moefold.model.moe.experts import Experts
from moefold.model.moe.layer import MoELayer
from moefold.model.moe.token_group import TokenPositions
from moefold.model.norm import RMSNorm
from moefold.model.paged_cache import CurrentPass, PagedAttention
from moefold.model.tp_interface import NoSequenceParallel
from moefold.model.transformer import Block
from moefold.ops.decode import DecodeKernel, DecodeLayer, DecodePass, LayerWeights, LinearWeights
from moefold.ops.rope import Rope

ATTENTION_PARAMETERS = frozenset(
    ("wq", "wk", "wv", "wo", "bq", "bk", "bv", "bo", "sinks", "query_norm.weight", "key_norm.weight")
)
MOE_PARAMETERS = frozenset(
    ("router.weight", "router.bias", "experts.w_gate", "experts.w_up", "experts.w_down", "shared_gate")
)
"""Parameters that `FusedBlock` reads, besides those of the shared expert: a layer with others keeps its modules."""
BLOCK_MODULES = {"attention_norm", "attention", "ffn_norm", "ffn"}


def supports_fused(block: nn.Module) -> bool:
    """Return whether `FusedBlock` computes a layer: grouped-query attention and SwiGLU, by the kernels it joins."""
    if type(block) is not Block or {name for name, _ in block.named_children()} != BLOCK_MODULES:
        return False
    attention = block.attention
    if not block.has_rope or block.residual_multiplier != 1:
        return False
    if type(attention) is not Attention or any(has_forward_hooks(m) for m in block.modules() if m is not block):
        return False
    kernels = attention.kernels
    parts = kernels.norm, kernels.rope, kernels.paged_attention, kernels.linear_backend, kernels.gemm
    norms = attention.query_norm, attention.key_norm
    block_norms = block.attention_norm, block.ffn_norm
    return (
        kernels.decode is not None
        and all(kernels.decode.joins(part) for part in parts)
        and kernels.qk_norm_rope is None
        and attention.head_size <= kernels.decode.max_head_dim
        and {name for name, _ in attention.named_parameters()} <= ATTENTION_PARAMETERS
        and all(norm is None or type(norm) is RMSNorm for norm in norms)
        and all(type(norm) is RMSNorm for norm in block_norms)
        and attention.kv_rows == slice(None)
        and attention.scale is None
        and not attention.chunk_size
        and not attention.norm_after_rope
        and isinstance(attention.sequence_parallel, NoSequenceParallel)
        and (type(block.ffn) is SwiGLU or _supports_moe(block.ffn, kernels.decode))
    )


def _supports_moe(ffn: nn.Module, kernel: DecodeKernel) -> bool:
    if type(ffn) is not MoELayer or type(ffn.experts) is not Experts or type(ffn.dispatcher) is not LocalDispatcher:
        return False
    names = {name for name, _ in ffn.named_parameters() if not name.startswith("shared.")}
    return (
        names <= MOE_PARAMETERS
        and all(map(kernel.joins, (ffn.experts.ops, ffn.experts.activation, ffn.dispatcher.permute_ops)))
        and not ffn.dispatcher.quantizes
        and not ffn.experts.applies_probs
        and not ffn.has_zero_experts
        and not ffn.is_shortcut
        and ffn.router.logits_dtype(torch.float32) == torch.float32
    )


class FusedBlock:
    """Forward pass of a layer over the rows of a decoder's pass, by a kernel for the whole layer.

    The router chooses the experts between the two calls of the kernel, and shared experts and dense feed-forward
    layers are modules, so that their variants are those of training.

    Args:
        block: a layer that `supports_fused`; its weights must not change as long as this object is used.
        decode_pass: shared by the layers.
        current_pass: the rows of the pass that runs.
        cache: the paged cache of the layer.
    """

    def __init__(self, block: Block, decode_pass: DecodePass, current_pass: CurrentPass, cache: PagedAttention) -> None:
        self._ffn = block.ffn
        self._block = block
        self._decode_pass = decode_pass
        self._current_pass = current_pass
        self._cache = cache
        self._layer: DecodeLayer | None = None

    @torch.no_grad()
    def __call__(self, x: Tensor, rope: Rope) -> Tensor:
        """Compute `Block.forward` for rows [R, 1, H] of the current pass."""
        if not len(x):
            return x
        x_RH = x.squeeze(1)
        if self._layer is None:
            self._layer = self._build(x_RH)
        layer = self._layer
        y_RH, normed_RH, logits_RE = layer.attend(x_RH, self._current_pass.decode_rows(rope))
        ffn = self._ffn
        if logits_RE is None:
            return y_RH.unsqueeze(1) + ffn(normed_RH.unsqueeze(1))
        assert isinstance(ffn, MoELayer)
        positions = TokenPositions(ffn.micro_batch_group, len(x), self._current_pass.single_sample)
        routing = ffn.router.route(logits_RE, x.dtype, positions)
        shared = None if ffn.shared is None else ffn.run_shared_expert(normed_RH.unsqueeze(1)).squeeze(1)
        layer.add_experts(y_RH, normed_RH, routing.ids_TK, routing.probs_TK, shared)
        return y_RH.unsqueeze(1)

    def _build(self, like: Tensor) -> DecodeLayer:
        """Return the layer with its pages, which this call allocates."""
        weights = layer_weights(self._block, like)
        num_groups = len(weights.key.weight) // weights.head_dim
        return self._decode_pass.layer(weights, *self._cache.kernel_pages(num_groups, weights.head_dim, like))


def layer_weights(block: Block, like: Tensor) -> LayerWeights:
    """Return the weights of a layer for rows of the dtype of a tensor."""
    dtype = like.dtype
    attention = block.attention
    assert isinstance(attention, Attention)
    assert isinstance(block.attention_norm, RMSNorm)
    assert isinstance(block.ffn_norm, RMSNorm)

    def linear(weight: Tensor, bias: Tensor | None, dtype: torch.dtype = dtype) -> LinearWeights:
        return LinearWeights(local_param(weight, dtype), None if bias is None else local_param(bias, dtype))

    query_norm, key_norm = (
        norm if isinstance(norm, RMSNorm) else None for norm in (attention.query_norm, attention.key_norm)
    )
    router = None
    experts = None
    top_k = 0
    if isinstance(ffn := block.ffn, MoELayer):
        router = linear(ffn.router.weight, ffn.router.bias, torch.float32)
        matrix_dtype = ffn.experts.ops.weight_dtype(like)
        gate, up, down = (local_param(weight, matrix_dtype) for weight in ffn.experts.computed_weights)
        experts = gate, up, down
        top_k = ffn.router.top_k
    return LayerWeights(
        query=linear(attention.wq, attention.bq),
        key=linear(attention.wk, attention.bk),
        value=linear(attention.wv, attention.bv),
        output=linear(attention.wo, attention.bo),
        attention_norm=block.attention_norm.local_weight(like),
        ffn_norm=block.ffn_norm.local_weight(like),
        query_norm=None if query_norm is None else query_norm.local_weight(like),
        key_norm=None if key_norm is None else key_norm.local_weight(like),
        sinks=None if attention.sinks is None else local_param(attention.sinks, dtype),
        head_dim=attention.head_size,
        window=attention.window,
        eps=block.attention_norm.eps,
        query_key_eps=0.0 if query_norm is None else query_norm.eps,
        router=router,
        experts=experts,
        top_k=top_k,
    )
