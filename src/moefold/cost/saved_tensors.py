"""Bytes by model part, and profiles of what the kernels of a device save for backward. Torch-free."""

from collections import Counter
from dataclasses import dataclass

INT_BYTES = 8
BytesByPart = Counter[str]
"""Bytes by one of `PARTS`."""
PARTS = (
    "embedding", "norms", "attention", "core attention", "dense MLP", "router", "dispatch buffers", "experts",
    "shared experts", "logits", "residual stream", "pipeline",
)  # fmt: skip
"""Parts of the model that activations belong to."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelProfile:
    """Properties of a device's kernels that decide which tensors they save for backward."""

    grouped_experts: bool
    """Grouped GEMM: the experts of a rank run together. Four inner widths of a SwiGLU are counted, an upper bound: they
    save two and recompute the activation. Else they run one after another, and the two inner projections are saved."""
    fused_swiglu: bool = False
    """Fused SwiGLU (gate, SiLU and product), which saves its two inputs: three inner widths in all, or two if
    expert_activation, which is that kernel alone, is recomputed."""
    tiled_loss: bool = False
    """In addition to what the loss saves, only the logits of a tile of tokens are in memory, unless its GEMM's weight
    gradient is delayed."""
    caches_quantized_weights: bool = False
    """The GEMMs of `fp8-blockwise` keep quantised weights for a step, see `unit_memory.caches_quantized_weights`."""


CPU_KERNELS = KernelProfile(grouped_experts=False, tiled_loss=True)
CUDA_KERNELS = KernelProfile(grouped_experts=True, caches_quantized_weights=True)
KERNEL_PROFILES = {"cpu": CPU_KERNELS, "cuda": CUDA_KERNELS}
"""Kernel profile by device type."""
MEGATRON_KERNELS = KernelProfile(grouped_experts=True, fused_swiglu=True)
"""Profile of Megatron-Core with Transformer Engine, on which most published steps were measured."""
