"""Bytes by model part, and profiles of the tensors that the kernels of a device save for backward."""

from collections import Counter

from moefold.config.groups.layer_sizes import KernelProfile

INT_BYTES = 8
BytesByPart = Counter[str]
"""Bytes by one of `PARTS`."""
PARTS = (
    "embedding", "norms", "attention", "core attention", "dense MLP", "router", "dispatch buffers", "experts",
    "shared experts", "logits", "residual stream", "pipeline",
)  # fmt: skip
"""Parts of the model that activations belong to."""


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
