"""Selection of the GEMMs of `train.precision`: tensor cores if they agree with the emulation."""

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from moefold.config.schema import Config
from moefold.config.sections.run import RunConfig
from moefold.cost.state_bytes import caches_quantized_weights
from moefold.ops.autotune import Autotuner
from moefold.ops.kernel_support import triton_unsupported_reason
from moefold.ops.quantization.emulated import EmulatedExpertOps, EmulatedLinear
from moefold.ops.quantization.formats import QUANT_FORMATS, QuantFormat
from moefold.ops.quantization.scaled_mm import ScaledMMLinear, scaled_mm_unsupported_reason
from moefold.ops.quantization.weight_cache import WeightCache
from moefold.parallel.kernels.selected import SelectedKernels, triton_kernels

if TYPE_CHECKING:
    from moefold.ops.triton.fp8_gemm import Fp8ExpertOps, Fp8Linear

logger = logging.getLogger(__name__)

MIN_FP8_CAPABILITY = (8, 9)
"""First compute capability whose tensor cores support e4m3: Ada, then Hopper."""
BLOCKWISE_SCALED_MM_CAPABILITY = (9, 0)
"""The only compute capability for which torch's `scaled_mm` takes blocks of 128: Hopper."""
WHOLE_BLOCK_SIZES = (512, 384, 256)
"""Sizes of the self-test of `scaled_mm` with blocks of 128: rows of three blocks, whose scales are padded to four."""
MIN_MX_CAPABILITY = (10, 0)
"""First compute capability whose tensor cores support scales of blocks of 32 and 16 values: Blackwell."""


def low_precision_kernels(cfg: Config, device: torch.device, autotuner: Autotuner) -> SelectedKernels:
    """Return the kernels of a recipe whose GEMMs are quantised."""
    name = cfg.train.precision
    if name != "fp8-blockwise":
        return _scaled_mm_kernels(cfg.run, QUANT_FORMATS[name], device)
    reason = fp8_unsupported_reason(cfg.run, device)
    if not reason:
        from moefold.ops.triton.fp8_gemm import Fp8ExpertOps

        weight_cache = WeightCache(
            is_enabled=caches_quantized_weights(cfg.train, cfg.num_micro_batches, cfg.parallel.zero)
        )
        expert_ops = Fp8ExpertOps(QUANT_FORMATS[name].block_size, weight_cache, autotuner)
        kernels = triton_kernels(cfg.run, cfg.model, cfg.parallel, cfg.moe, device, autotuner)
        linear_backend, dense_message = select_fp8_linear(expert_ops, device, getattr(torch, cfg.run.dtype))
        return replace(
            kernels,
            expert_ops=expert_ops,
            linear_backend=linear_backend,
            swiglu=expert_ops,
            message=f"train.precision={name!r}: on the tensor cores{dense_message}{kernels.message}",
            weight_cache=weight_cache,
        )
    return _emulated_kernels(EmulatedLinear(QUANT_FORMATS[name]), reason)


def select_fp8_linear(expert_ops: "Fp8ExpertOps", device: torch.device, dtype: torch.dtype) -> tuple["Fp8Linear", str]:
    """Select cuBLAS for dense layers on Hopper, where it is faster, if it agrees with the emulation, with a message."""
    from moefold.ops.triton.fp8_gemm import Fp8ExpertOps, Fp8Linear
    from moefold.ops.triton.fp8_linear import ScaledMMFp8Linear

    kernels = Fp8Linear(expert_ops)
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != BLOCKWISE_SCALED_MM_CAPABILITY:
        return kernels, ""
    # The tested backend measures nothing: it uses cuBLAS in every product.
    tested = ScaledMMFp8Linear(Fp8ExpertOps(expert_ops.block_size))
    reason = scaled_mm_unsupported_reason(tested, QUANT_FORMATS["fp8-blockwise"], device, dtype, WHOLE_BLOCK_SIZES)
    if reason:
        return kernels, f", dense layers without cuBLAS, as {reason}"
    return ScaledMMFp8Linear(expert_ops), ""


def _scaled_mm_kernels(run: RunConfig, quant_format: QuantFormat, device: torch.device) -> SelectedKernels:
    """Select torch's scaled GEMMs for a format if the device supports them and they pass the self-test."""
    reason = tensor_core_unsupported_reason(run, device, MIN_MX_CAPABILITY)
    if reason:
        return _emulated_kernels(EmulatedLinear(quant_format), reason)
    return verified_kernels(ScaledMMLinear(quant_format), device, getattr(torch, run.dtype))


def verified_kernels(linear_backend: ScaledMMLinear, device: torch.device, dtype: torch.dtype) -> SelectedKernels:
    """Select the device's scaled GEMMs if they agree with the emulation, otherwise the emulation, with a warning."""
    name = linear_backend.quant_format.name
    reason = scaled_mm_unsupported_reason(linear_backend, linear_backend.quant_format, device, dtype)
    if reason:
        # Each rank tests its own device. The log message is rank 0's.
        logger.warning("train.precision=%r is simulated on %s: %s", name, device, reason)
        return _emulated_kernels(EmulatedLinear(linear_backend.quant_format), reason)
    message = f"train.precision={name!r}: on the tensor cores, one expert after another"
    return SelectedKernels(expert_ops=EmulatedExpertOps(linear_backend), linear_backend=linear_backend, message=message)


def _emulated_kernels(linear_backend: EmulatedLinear, reason: str) -> SelectedKernels:
    message = (
        f"train.precision={linear_backend.quant_format.name!r}: simulated, at the speed of float32 at best, as {reason}"
    )
    return SelectedKernels(expert_ops=EmulatedExpertOps(linear_backend), linear_backend=linear_backend, message=message)


def fp8_unsupported_reason(run: RunConfig, device: torch.device) -> str:
    """Return the reason why GEMMs of `fp8-blockwise` are emulated here, or empty if our kernels compute them."""
    return tensor_core_unsupported_reason(run, device, MIN_FP8_CAPABILITY) or triton_unsupported_reason(
        run, device.type
    )


def tensor_core_unsupported_reason(run: RunConfig, device: torch.device, capability: tuple[int, int]) -> str:
    """Return the reason why low-precision tensor cores are not used, or empty if recipe and device allow them."""
    if run.kernels == "plain":
        return "run.kernels='plain'"
    if device.type != "cuda":
        return f"{device.type} has no tensor cores for it"
    if run.dtype == "float64":
        return "run.dtype='float64' is beyond their float32 sums"
    if torch.cuda.get_device_capability(device) < capability:
        return "the GPU has no tensor cores for it"
    return ""
