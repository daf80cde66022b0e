"""Bytes by model part, and profiles of the tensors that the kernels of a device save for backward."""

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

    device_type: str
    """Device of the kernels."""
    grouped_experts: bool
    """Grouped GEMM: the experts of a rank run together, else one after another. Either way two inner widths are saved,
    the gate and up projections: the backward pass recomputes the activation."""
    fused_swiglu: bool = False
    """Fused SwiGLU (gate, SiLU and product), which saves its two inputs: three inner widths in all, or two if
    expert_activation (only that kernel) is recomputed."""
    experts_apply_probs: bool = False
    """The experts' kernels apply the routing probabilities to the hidden values, if the recipe runs them."""
    tiled_loss: bool = False
    """Besides the saved tensors of the loss, only the logits of a tile of tokens are in memory, unless its GEMM's
    weight gradient is delayed."""
    caches_quantized_weights: bool = False
    """The GEMMs of `fp8-blockwise` keep quantised weights for a step, see `unit_memory.caches_quantized_weights`."""

    narrow_values: bool = False
    """Attention takes values with fewer dims than the keys, if no blocks of context parallelism, documents or windows
    limit it; else they are padded."""


CPU_KERNELS = KernelProfile(device_type="cpu", grouped_experts=False, tiled_loss=True)
CUDA_KERNELS = KernelProfile(
    device_type="cuda",
    grouped_experts=True,
    experts_apply_probs=True,
    caches_quantized_weights=True,
    narrow_values=True,
)
KERNEL_PROFILES = {kernels.device_type: kernels for kernels in (CPU_KERNELS, CUDA_KERNELS)}
"""Kernel profile by device type."""
MEGATRON_KERNELS = KernelProfile(device_type="cuda", grouped_experts=True, fused_swiglu=True)
"""Profile of Megatron-Core with Transformer Engine, on which most published steps were measured."""
