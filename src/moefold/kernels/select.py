"""Who computes on this machine: plain operations or kernels (`run.kernels`), in which precision (`train.precision`)."""

import logging
from dataclasses import dataclass

import torch

from moefold.config.checks_kernels import check_kernel_device, triton_fault
from moefold.config.schema import Config, RunConfig
from moefold.errors import ConfigError
from moefold.kernels.measured import MeasuredChoice
from moefold.kernels.rows import RowKernels
from moefold.model.core_attention import CausalKernel
from moefold.model.cpu_norm import NormKernel
from moefold.model.gated import GateKernel
from moefold.model.gemm import LIBRARY, Gemm
from moefold.model.linear import FullProducts, Products
from moefold.model.rope import Turn
from moefold.moe.gate import Gate
from moefold.moe.router import RoutingKernel
from moefold.precision.products import SimulatedProducts, SimulatedRows
from moefold.precision.recipe import RECIPES, Recipe
from moefold.precision.scaled_products import ScaledProducts, probe

logger = logging.getLogger(__name__)

FP8_CAPABILITY = (8, 9)
"""The first NVIDIA devices whose matrix units multiply e4m3: Ada, then Hopper."""
MX_CAPABILITY = (10, 0)
"""The first ones whose matrix units read scales of 32 and 16 values: Blackwell."""


@dataclass(frozen=True)
class Kernels:
    """What was selected; None stands for the plain operations."""

    rows: RowKernels | None = None
    """Of experts."""
    products: Products | None = None
    """Of the other linear layers."""
    routing: RoutingKernel | None = None
    """Of routers."""
    gate: GateKernel | None = None
    """Of dense layers and shared experts."""
    turn: Turn | None = None
    """Of queries and keys."""
    note: str = ""
    """What the recipe left open and how it was decided."""
    expert_gate: Gate | None = None
    """Of routed experts, where `rows` does not bring it; None: as the experts were built."""
    attention: CausalKernel | None = None
    """Of layers whose samples are not cut over ranks."""
    gemm: Gemm = LIBRARY
    """Of routed experts, where `rows` does not multiply, and of the loss."""
    norm: NormKernel | None = None
    """Of each RMSNorm on a CPU."""


def select_kernels(cfg: Config, device: torch.device) -> Kernels:
    """The kernels of all layers of this rank.

    Raises:
        ConfigError: `run.kernels` asks for what cannot run here.
    """
    if cfg.train.precision != "dtype":
        return _narrow_kernels(cfg, device)
    if cfg.run.kernels == "plain":
        return Kernels()
    check_kernel_device(cfg, device.type)
    if device.type == "cpu" and cfg.run.kernels in ("auto", "c"):
        return _cpu_kernels(cfg)
    if cfg.run.kernels == "auto" and device.type != "cuda":
        return Kernels()
    fault = triton_fault(cfg.run, device.type)
    if cfg.run.kernels == "auto" and (fault or cfg.run.dtype != "bfloat16"):
        # In float32 its products would not use the matrix units, which torch's may.
        return Kernels(note=f"run.kernels='auto': plain, as {fault or f'run.dtype={cfg.run.dtype!r}'}")
    from moefold.kernels.triton_rope import turn
    from moefold.kernels.triton_rows import TritonRows

    rows = TritonRows(MeasuredChoice(measures=not cfg.run.deterministic))
    routing, note = _routing(cfg)
    return Kernels(rows, routing=routing, gate=rows, turn=turn, note=f"run.kernels={cfg.run.kernels!r}: triton{note}")


def _cpu_kernels(cfg: Config) -> Kernels:
    """What is in C: where that is fast, and there is a compiler; float64 is plain, and so are gates but SwiGLU's."""
    if cfg.run.dtype == "float64":
        return Kernels()
    from moefold.kernels.c_attention import CAttention
    from moefold.kernels.c_gate import CGate
    from moefold.kernels.c_library import CompilerError, build_libraries
    from moefold.kernels.c_norm import CNorm
    from moefold.kernels.c_product import CGemm
    from moefold.kernels.c_rope import CTurn

    try:
        build_libraries("product", "experts", "norm", "rope", "attention")
        gemm, gate, norm, turn, attention = CGemm(), CGate(), CNorm(), CTurn(), CAttention()
    except CompilerError as fault:
        if cfg.run.kernels == "c":
            raise ConfigError(
                f"run.kernels='c' cannot run: {fault}; install gcc, or set run.kernels to 'auto' or 'plain'"
            ) from None
        return Kernels(note=f"run.kernels='auto': plain, as {fault}")
    multiplies, has_gate = gemm.is_fast(getattr(torch, cfg.run.dtype)), cfg.model.moe_activation == "swiglu"
    parts = {"products": multiplies, "gates of experts": has_gate, "norms": True, "rotations": True}
    parts["causal attention"] = attention.is_fast
    note = f"run.kernels={cfg.run.kernels!r}: {', '.join(part for part in parts if parts[part])} in C"
    return Kernels(
        products=FullProducts(gemm) if multiplies else None,
        turn=turn,
        note=note if has_gate else f"{note}; plain gates of experts, as they are not SwiGLU's",
        expert_gate=gate if has_gate else None,
        attention=attention if attention.is_fast else None,
        gemm=gemm if multiplies else LIBRARY,
        norm=norm,
    )


def _routing(cfg: Config) -> tuple[RoutingKernel | None, str]:
    """The kernel of the routers, or what to say where none knows them."""
    from moefold.moe.fused_router import FusedRouting, routing_fault

    fault = routing_fault(cfg.model, cfg.moe)
    return (None, f", but plain routing, as {fault}") if fault else (FusedRouting(cfg.model), "")


def _narrow_kernels(cfg: Config, device: torch.device) -> Kernels:
    name = cfg.train.precision
    if name != "fp8-blockwise":
        return _scaled_kernels(cfg.run, RECIPES[name], device)
    fault = fp8_fault(cfg.run, device)
    if not fault:
        from moefold.kernels.triton_fp8 import Fp8Products, Fp8Rows
        from moefold.kernels.triton_rope import turn

        rows = Fp8Rows(RECIPES[name].block)
        routing, note = _routing(cfg)
        note = f"train.precision={name!r}: on the matrix units{note}"
        return Kernels(rows, Fp8Products(rows), routing, rows, turn, note)
    return _simulated(SimulatedProducts(RECIPES[name]), fault)


def _scaled_kernels(run: RunConfig, recipe: Recipe, device: torch.device) -> Kernels:
    """Products of formats that torch multiplies, where it is found to do so rightly."""
    fault = matrix_unit_fault(run, device, MX_CAPABILITY)
    if fault:
        return _simulated(SimulatedProducts(recipe), fault)
    return kernels_if_right(ScaledProducts(recipe), device, getattr(torch, run.dtype))


def kernels_if_right(products: ScaledProducts, device: torch.device, dtype: torch.dtype) -> Kernels:
    """Products of the device if they agree with the simulation there, else the simulation, with a warning."""
    name, fault = products.recipe.name, probe(products, device, dtype)
    if fault:
        # Each rank tries its own device, and the note is that of the first one.
        logger.warning("train.precision=%r is simulated on %s: %s", name, device, fault)
        return _simulated(SimulatedProducts(products.recipe), fault)
    note = f"train.precision={name!r}: on the matrix units, one expert after another"
    return Kernels(SimulatedRows(products), products, note=note)


def _simulated(products: SimulatedProducts, fault: str) -> Kernels:
    note = f"train.precision={products.recipe.name!r}: simulated, at the speed of float32 at best, as {fault}"
    return Kernels(SimulatedRows(products), products, note=note)


def fp8_fault(run: RunConfig, device: torch.device) -> str:
    """Why products of `fp8-blockwise` are simulated here; empty if our kernels compute them."""
    return matrix_unit_fault(run, device, FP8_CAPABILITY) or triton_fault(run, device.type)


def matrix_unit_fault(run: RunConfig, device: torch.device, capability: tuple[int, int]) -> str:
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
