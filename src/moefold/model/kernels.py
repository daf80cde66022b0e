"""Kernels of the layers of a model, in one object that every module reads."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

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
    from moefold.ops.cpu.attention import CAttention
    from moefold.ops.cpu.decode import CDecode
    from moefold.ops.cpu.draw import CDraw
    from moefold.ops.cpu.paged_attention import CPagedAttention
    from moefold.ops.linear_attention import ChunkKernel, ConvolutionKernel
    from moefold.ops.paged_flash import FlashPages


class RoutingKernel(Protocol):
    """Fused router: experts, probabilities and loss sums from the logits in one pass."""

    def __call__(self, logits_TE: Tensor, bias_E: Tensor | None) -> Any:
        """Return `moefold.ops.triton.router.RouterOutput`; `bias_E` is added to the scores for the top-k only."""
        ...


class SoftmaxKernel(Protocol):
    """Kernel of the softmax over the experts in a router."""

    def __call__(self, x: Tensor) -> Tensor:
        """Return the differentiable softmax over the last dim."""
        ...


class QKNormRopeKernel(Protocol):
    """QK norm and RoPE of queries and keys in one function."""

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        weights: tuple[Tensor, Tensor],
        eps: float,
        angles: tuple[Tensor, Tensor],
        *,
        is_interleaved: bool,
    ) -> tuple[Tensor, Tensor]:
        """Normalise and rotate each head.

        Args:
            query: [S, B, A, D].
            key: [S, B, G, D].
            weights: weights of the norms of queries and keys, [D] each.
            eps: added to the mean of squares.
            angles: cosines and sines of `Rope`.
            is_interleaved: see `Rope`.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """The kernels of all layers; None means the torch operations."""

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
    qk_norm_rope: QKNormRopeKernel | None = None
    """QK norm of each head together with RoPE; None: one after the other."""
    expert_activation: ExpertActivation | None = None
    """Activation of routed experts; None: the activation that the experts were built with."""
    attention: "CAttention | None" = None
    """Causal attention of layers without context parallelism."""
    linear_attention: "ChunkKernel | None" = None
    """Gated linear attention in chunks."""
    convolution: "ConvolutionKernel | None" = None
    """Short causal convolutions of linear attention."""
    paged_attention: "CPagedAttention | None" = None
    """Attention of decoding, to the pages of a cache."""
    page_reader: "FlashPages | None" = None
    """Attention of decoding on CUDA, to the pages of a cache; None if these are gathered."""
    decode: "CDecode | None" = None
    """Whole layers of decoding; None: the modules, one after another."""
    decode_choice: DecodeChoice | None = None
    """Numbers of rows that `decode` computes; None: all, with the bits of the other kernels."""
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
