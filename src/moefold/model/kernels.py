"""Kernels of the layers of a model, in one object that every module reads."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from moefold.model.linear import LinearBackend
from moefold.ops.block_attention import CausalKernel
from moefold.ops.cross_entropy import TORCH_CROSS_ENTROPY_OPS, CrossEntropyOps
from moefold.ops.decode import DecodeChoice
from moefold.ops.expert_ops import ExpertOps
from moefold.ops.gemm import TORCH_GEMM, Gemm
from moefold.ops.norm import NormKernel
from moefold.ops.permute import TORCH_PERMUTE_OPS, PermuteOps
from moefold.ops.rope import RopeKernel
from moefold.ops.swiglu import ExpertActivation, SwiGLUKernel
from moefold.ops.torch_experts import TORCH_EXPERT_OPS

if TYPE_CHECKING:
    from moefold.ops.compiled import CompiledQKNormRope
    from moefold.ops.cpu.attention import CAttention
    from moefold.ops.cpu.decode import CDecode
    from moefold.ops.cpu.draw import CDraw
    from moefold.ops.cpu.paged_attention import CPagedAttention
    from moefold.ops.linear_attention import ChunkKernel, ConvolutionKernel
    from moefold.ops.paged_flash import FlashPages

RoutingKernel = Callable[[Tensor, Tensor | None], Any]
"""Fused router: returns `moefold.ops.triton.router.RouterOutput` of logits [T, E] and a bias [E] for the top-k only."""
SoftmaxKernel = Callable[[Tensor], Tensor]
"""Differentiable softmax over the last dim, the experts of a router."""


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """The kernels of all layers. None means the torch operations."""

    expert_ops: ExpertOps = TORCH_EXPERT_OPS
    """Ops of the routed experts."""
    permute_ops: PermuteOps = TORCH_PERMUTE_OPS
    """Ops of the dispatchers, which permute tokens and combine expert outputs."""
    linear_backend: LinearBackend | None = None
    """GEMMs of the other linear layers."""
    router: RoutingKernel | None = None
    """Routing of the routers."""
    router_softmax: SoftmaxKernel | None = None
    """Softmax of the routers."""
    swiglu: SwiGLUKernel | None = None
    """SwiGLU of dense layers and shared experts."""
    rope: RopeKernel | None = None
    """RoPE of queries and keys."""
    qk_norm_rope: "CompiledQKNormRope | None" = None
    """QK norm of each head together with RoPE. None means one after the other."""
    expert_activation: ExpertActivation | None = None
    """Activation of routed experts. None means the activation that the experts were built with."""
    attention: "CAttention | None" = None
    """Causal attention of layers without context parallelism."""
    linear_attention: "ChunkKernel | None" = None
    """Gated linear attention in chunks."""
    convolution: "ConvolutionKernel | None" = None
    """Short causal convolutions of linear attention."""
    paged_attention: "CPagedAttention | None" = None
    """Attention of decoding, to the pages of a cache."""
    page_reader: "FlashPages | None" = None
    """Attention of decoding on CUDA, to the pages of a cache, or None if these are gathered."""
    decode: "CDecode | None" = None
    """Whole layers of decoding. None means the modules, one after another."""
    decode_choice: DecodeChoice | None = None
    """Numbers of rows that `decode` computes. None means all, with the bits of the other kernels."""
    block_attention: CausalKernel | None = None
    """Attention with log-sum-exp, of all keys or causal: for sinks, and for blocks of context parallelism."""
    gemm: Gemm = TORCH_GEMM
    """GEMM of the logits, of the loss and of the routers."""
    cross_entropy_ops: CrossEntropyOps = TORCH_CROSS_ENTROPY_OPS
    """Ops of the loss on logits."""
    norm: NormKernel | None = None
    """RMSNorm on a CPU."""
    draw: "CDraw | None" = None
    """Draws of tokens on a CPU."""


TORCH_KERNELS = Kernels()
"""The torch operations everywhere: the default of every module."""
