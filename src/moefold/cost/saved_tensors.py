"""Bytes by part of the model, and what the kernels of a device keep for the backward pass. Torch-free."""

from collections import Counter
from dataclasses import dataclass

INT_BYTES = 8
BytesByPart = Counter[str]
"""Bytes by part: embedding, norms, attention, core attention, dense MLP, router, dispatch buffers, experts, shared
experts, logits, residual stream, pipeline."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelProfile:
    """What a device's kernels keep."""

    grouped_experts: bool
    """The experts of a rank run together and keep all of a SwiGLU, four inner widths. Else one after another, and the
    two inner projections are kept."""
    fused_swiglu: bool = False
    """Gate, SiLU and product are one kernel, which keeps its two inputs: of a SwiGLU three inner widths stay, and two
    where expert_activation runs again, which is that kernel alone."""
    tiled_loss: bool = False
    """Beside what the loss keeps, it has the logits of few tokens in memory, where no product of all is postponed."""
    low_precision_router: bool = False
    """The router's product takes its input in the compute type, and its choices stay as one map: no copy is kept."""


CPU_KERNELS = KernelProfile(grouped_experts=False, tiled_loss=True)
CUDA_KERNELS = KernelProfile(grouped_experts=True)
KERNEL_PROFILES = {"cpu": CPU_KERNELS, "cuda": CUDA_KERNELS}
"""By device type."""
MEGATRON_KERNELS = KernelProfile(grouped_experts=True, fused_swiglu=True, low_precision_router=True)
"""Of Megatron-Core with Transformer Engine, on which most published steps were measured."""
