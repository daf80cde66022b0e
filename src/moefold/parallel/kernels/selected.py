"""The kernels of a run, and the kernels that are the same for every precision of the GEMMs."""

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import torch

from moefold.config.chosen import chosen_in
from moefold.config.groups.context import ContextPart
from moefold.config.model import ModelConfig
from moefold.config.sections.moe import MoEConfig
from moefold.config.sections.parallel import ParallelConfig
from moefold.config.sections.run import RunConfig
from moefold.model.kernels import Kernels, RoutingKernel
from moefold.model.moe.router import FusedRouting, fused_router_unsupported_reason
from moefold.ops.autotune import Autotuner
from moefold.ops.quantization.weight_cache import WeightCache

if TYPE_CHECKING:
    from moefold.ops.measured_attention import MeasuredBlockAttention


@dataclass(frozen=True, kw_only=True)
class SelectedKernels(Kernels):
    """The kernels of a run."""

    message: str = ""
    """Log message about the resolved open choices of the recipe."""
    weight_cache: WeightCache = field(default_factory=WeightCache)
    """Quantised weights of the current step."""
    autotuner: Autotuner = field(default_factory=partial(Autotuner, is_enabled=False))
    """Choices among the kernels by time, for each shape."""


def triton_kernels(
    run: RunConfig,
    model: ModelConfig,
    parallel: ParallelConfig,
    moe: MoEConfig,
    device: torch.device,
    autotuner: Autotuner,
) -> SelectedKernels:
    """Return the kernels that are the same for every precision of the GEMMs, with the message about them."""
    from moefold.ops.triton.cross_entropy import TritonCrossEntropyOps
    from moefold.ops.triton.linear_attention import TritonLinearAttention
    from moefold.ops.triton.permute import TritonPermuteOps
    from moefold.ops.triton.rope import apply_rope

    routing, routing_message = _router_kernel(model, moe)
    block_attention, attention_message = block_attention_kernel(run, model, parallel, device, autotuner)
    has_recurrence = any(layer.core.state_size > 0 for layer in model.decoder_layers)
    return SelectedKernels(
        permute_ops=TritonPermuteOps(),
        router=routing,
        rope=apply_rope,
        block_attention=block_attention,
        linear_attention=TritonLinearAttention() if has_recurrence else None,
        cross_entropy_ops=TritonCrossEntropyOps(),
        message=routing_message + attention_message,
    )


def block_attention_kernel(
    run: RunConfig, model: ModelConfig, parallel: ParallelConfig, device: torch.device, autotuner: Autotuner
) -> tuple["MeasuredBlockAttention | None", str]:
    """Return cuDNN's attention for sinks and blocks if the device has it and it agrees, with a message if it does not.

    Where flash attention is faster, it computes them.

    None with `run.deterministic`: its backward pass may not be deterministic.
    """
    needs_lse = any(layer.attention.has_sinks for layer in model.decoder_layers)
    if parallel.cp > 1:
        needs_lse = not chosen_in(parallel, ContextPart).shards_heads
    if device.type != "cuda" or run.deterministic or not needs_lse:
        return None, ""
    from moefold.ops.cudnn_attention import CudnnAttention, probe_cudnn_attention
    from moefold.ops.measured_attention import MeasuredBlockAttention

    reason = probe_cudnn_attention(device)
    if reason:
        return None, f"; flash attention for blocks, as {reason}"
    return MeasuredBlockAttention(autotuner, "cuDNN", CudnnAttention()), ""


def _router_kernel(model: ModelConfig, moe: MoEConfig) -> tuple[RoutingKernel | None, str]:
    """Return the fused kernel of the routers, or None with a message if it does not support the model."""
    reason = fused_router_unsupported_reason(model, moe)
    if reason or model.routed is None:
        return None, f", but plain routing, as {reason}" if reason else ""
    return FusedRouting(model.routed), ""
