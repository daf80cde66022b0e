"""Who computes on this machine: plain operations or kernels (`run.kernels`), in which precision (`train.precision`)."""

import logging
from dataclasses import dataclass

import torch

from moefold.config.schema import Config, RunConfig
from moefold.errors import ConfigError
from moefold.model.attention import CausalKernel
from moefold.model.linear import LinearBackend, UnquantizedLinear
from moefold.model.moe.router import RoutingKernel
from moefold.ops.autotune import Autotuner
from moefold.ops.gemm import TORCH_GEMM, Gemm
from moefold.ops.interface import ExpertOps
from moefold.ops.norm import NormKernel
from moefold.ops.quantization.emulated import EmulatedExpertOps, EmulatedLinear
from moefold.ops.quantization.formats import QUANT_FORMATS, QuantFormat
from moefold.ops.quantization.scaled_mm import ScaledMMLinear, scaled_mm_unsupported_reason
from moefold.ops.rope import RopeKernel
from moefold.ops.swiglu import ExpertActivation, SwiGLUKernel
from moefold.validate.train import check_kernel_device, triton_unsupported_reason

logger = logging.getLogger(__name__)

MIN_FP8_CAPABILITY = (8, 9)
"""The first NVIDIA devices whose matrix units multiply e4m3: Ada, then Hopper."""
MIN_MX_CAPABILITY = (10, 0)
"""The first ones whose matrix units read scales of 32 and 16 values: Blackwell."""


@dataclass(frozen=True)
class SelectedKernels:
    """What was selected; None stands for the plain operations."""

    expert_ops: ExpertOps | None = None
    """Of experts."""
    linear_backend: LinearBackend | None = None
    """Of the other linear layers."""
    router: RoutingKernel | None = None
    """Of routers."""
    swiglu: SwiGLUKernel | None = None
    """Of dense layers and shared experts."""
    rope: RopeKernel | None = None
    """Of queries and keys."""
    message: str = ""
    """What the recipe left open and how it was decided."""
    expert_activation: ExpertActivation | None = None
    """Of routed experts, where `expert_ops` does not bring it; None: as the experts were built."""
    attention: CausalKernel | None = None
    """Of layers whose samples are not cut over ranks."""
    gemm: Gemm = TORCH_GEMM
    """Of routed experts, where `expert_ops` does not multiply, and of the loss."""
    norm: NormKernel | None = None
    """Of each RMSNorm on a CPU."""


def select_kernels(cfg: Config, device: torch.device) -> SelectedKernels:
    """The kernels of all layers of this rank.

    Raises:
        ConfigError: `run.kernels` asks for what cannot run here.
    """
    if cfg.train.precision != "dtype":
        return _low_precision_kernels(cfg, device)
    if cfg.run.kernels == "plain":
        return SelectedKernels()
    check_kernel_device(cfg, device.type)
    if device.type == "cpu" and cfg.run.kernels in ("auto", "c"):
        return _cpu_kernels(cfg)
    if cfg.run.kernels == "auto" and device.type != "cuda":
        return SelectedKernels()
    fault = triton_unsupported_reason(cfg.run, device.type)
    if cfg.run.kernels == "auto" and (fault or cfg.run.dtype != "bfloat16"):
        # In float32 its products would not use the matrix units, which torch's may.
        return SelectedKernels(message=f"run.kernels='auto': plain, as {fault or f'run.dtype={cfg.run.dtype!r}'}")
    from moefold.ops.triton.experts import TritonExpertOps
    from moefold.ops.triton.rope import apply_rope

    rows = TritonExpertOps(Autotuner(is_enabled=not cfg.run.deterministic))
    routing, note = _router_kernel(cfg)
    return SelectedKernels(
        rows, router=routing, swiglu=rows, rope=apply_rope, message=f"run.kernels={cfg.run.kernels!r}: triton{note}"
    )


def _cpu_kernels(cfg: Config) -> SelectedKernels:
    """What is in C: where that is fast, and there is a compiler; float64 is plain, and so are gates but SwiGLU's."""
    if cfg.run.dtype == "float64":
        return SelectedKernels()
    from moefold.ops.cpu.attention import CAttention
    from moefold.ops.cpu.build import CompilerError, build_libraries
    from moefold.ops.cpu.gemm import CGemm
    from moefold.ops.cpu.norm import CNorm
    from moefold.ops.cpu.rope import CRope
    from moefold.ops.cpu.swiglu import CSwiGLU

    try:
        build_libraries("gemm", "swiglu", "norm", "rope", "attention")
        gemm = CGemm()
        gate = CSwiGLU()
        norm = CNorm()
        turn = CRope()
        attention = CAttention()
    except CompilerError as fault:
        if cfg.run.kernels == "c":
            raise ConfigError(
                f"run.kernels='c' cannot run: {fault}; install gcc, or set run.kernels to 'auto' or 'plain'"
            ) from None
        return SelectedKernels(message=f"run.kernels='auto': plain, as {fault}")
    multiplies = gemm.is_fast(getattr(torch, cfg.run.dtype))
    has_gate = cfg.model.moe_activation == "swiglu"
    parts = {"products": multiplies, "gates of experts": has_gate, "norms": True, "rotations": True}
    parts["causal attention"] = attention.is_fast
    note = f"run.kernels={cfg.run.kernels!r}: {', '.join(part for part in parts if parts[part])} in C"
    return SelectedKernels(
        linear_backend=UnquantizedLinear(gemm) if multiplies else None,
        rope=turn,
        message=note if has_gate else f"{note}; plain gates of experts, as they are not SwiGLU's",
        expert_activation=gate if has_gate else None,
        attention=attention if attention.is_fast else None,
        gemm=gemm if multiplies else TORCH_GEMM,
        norm=norm,
    )


def _router_kernel(cfg: Config) -> tuple[RoutingKernel | None, str]:
    """The kernel of the routers, or what to say where none knows them."""
    from moefold.model.moe.router import FusedRouting, fused_router_unsupported_reason

    fault = fused_router_unsupported_reason(cfg.model, cfg.moe)
    return (None, f", but plain routing, as {fault}") if fault else (FusedRouting(cfg.model), "")


def _low_precision_kernels(cfg: Config, device: torch.device) -> SelectedKernels:
    name = cfg.train.precision
    if name != "fp8-blockwise":
        return _scaled_mm_kernels(cfg.run, QUANT_FORMATS[name], device)
    fault = fp8_unsupported_reason(cfg.run, device)
    if not fault:
        from moefold.ops.triton.fp8_gemm import Fp8ExpertOps, Fp8Linear
        from moefold.ops.triton.rope import apply_rope

        rows = Fp8ExpertOps(QUANT_FORMATS[name].block_size)
        routing, note = _router_kernel(cfg)
        note = f"train.precision={name!r}: on the matrix units{note}"
        return SelectedKernels(rows, Fp8Linear(rows), routing, rows, apply_rope, note)
    return _emulated_kernels(EmulatedLinear(QUANT_FORMATS[name]), fault)


def _scaled_mm_kernels(run: RunConfig, quant_format: QuantFormat, device: torch.device) -> SelectedKernels:
    """Products of formats that torch multiplies, where it is found to do so rightly."""
    fault = tensor_core_unsupported_reason(run, device, MIN_MX_CAPABILITY)
    if fault:
        return _emulated_kernels(EmulatedLinear(quant_format), fault)
    return verified_kernels(ScaledMMLinear(quant_format), device, getattr(torch, run.dtype))


def verified_kernels(linear_backend: ScaledMMLinear, device: torch.device, dtype: torch.dtype) -> SelectedKernels:
    """Products of the device if they agree with the simulation there, else the simulation, with a warning."""
    name = linear_backend.quant_format.name
    fault = scaled_mm_unsupported_reason(linear_backend, device, dtype)
    if fault:
        # Each rank tries its own device, and the note is that of the first one.
        logger.warning("train.precision=%r is simulated on %s: %s", name, device, fault)
        return _emulated_kernels(EmulatedLinear(linear_backend.quant_format), fault)
    note = f"train.precision={name!r}: on the matrix units, one expert after another"
    return SelectedKernels(EmulatedExpertOps(linear_backend), linear_backend, message=note)


def _emulated_kernels(linear_backend: EmulatedLinear, reason: str) -> SelectedKernels:
    note = (
        f"train.precision={linear_backend.quant_format.name!r}: simulated, at the speed of float32 at best, as {reason}"
    )
    return SelectedKernels(EmulatedExpertOps(linear_backend), linear_backend, message=note)


def fp8_unsupported_reason(run: RunConfig, device: torch.device) -> str:
    """Why products of `fp8-blockwise` are simulated here; empty if our kernels compute them."""
    return tensor_core_unsupported_reason(run, device, MIN_FP8_CAPABILITY) or triton_unsupported_reason(
        run, device.type
    )


def tensor_core_unsupported_reason(run: RunConfig, device: torch.device, capability: tuple[int, int]) -> str:
    """Why no matrix units multiply few bits here; empty if the recipe lets them and the device is recent enough."""
    if run.kernels == "plain":
        return "run.kernels='plain'"
    if device.type != "cuda":
        return f"{device.type} has no matrix units for it"
    if run.dtype == "float64":
        return "run.dtype='float64' is beyond their float32 sums"
    if torch.cuda.get_device_capability(device) < capability:
        return "the GPU has no matrix units for it"
    return ""
