"""Who computes on this machine: plain operations or kernels (`run.kernels`), in which precision (`train.precision`)."""

from dataclasses import dataclass

import torch

from moefold.config.checks_kernels import check_kernel_device, triton_fault
from moefold.config.schema import Config, RunConfig
from moefold.kernels.measured import MeasuredChoice
from moefold.kernels.rows import RowKernels
from moefold.model.gated import GateKernel
from moefold.model.linear import Products
from moefold.model.rope import Turn
from moefold.moe.router import RoutingKernel
from moefold.precision.products import SimulatedProducts, SimulatedRows
from moefold.precision.recipe import RECIPES

FP8_CAPABILITY = (8, 9)
"""The first NVIDIA devices whose matrix units multiply e4m3: Ada, then Hopper."""


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


def select_kernels(cfg: Config, device: torch.device) -> Kernels:
    """The kernels of all layers of this rank.

    Raises:
        ConfigError: `run.kernels` asks for what cannot run here.
    """
    if cfg.train.precision != "dtype":
        return _narrow_kernels(cfg, device)
    if cfg.run.kernels == "plain" or (cfg.run.kernels == "auto" and device.type != "cuda"):
        return Kernels()
    check_kernel_device(cfg, device.type)
    fault = triton_fault(cfg.run, device.type)
    if cfg.run.kernels == "auto" and (fault or cfg.run.dtype != "bfloat16"):
        # In float32 its products would not use the matrix units, which torch's may.
        return Kernels(note=f"run.kernels='auto': plain, as {fault or f'run.dtype={cfg.run.dtype!r}'}")
    from moefold.kernels.triton_rope import turn
    from moefold.kernels.triton_rows import TritonRows

    rows = TritonRows(MeasuredChoice(measures=not cfg.run.deterministic))
    routing, note = _routing(cfg)
    return Kernels(rows, routing=routing, gate=rows, turn=turn, note=f"run.kernels={cfg.run.kernels!r}: triton{note}")


def _routing(cfg: Config) -> tuple[RoutingKernel | None, str]:
    """The kernel of the routers, or what to say where none knows them."""
    from moefold.moe.fused_router import FusedRouting, routing_fault

    fault = routing_fault(cfg.model, cfg.moe)
    return (None, f", but plain routing, as {fault}") if fault else (FusedRouting(cfg.model), "")


def _narrow_kernels(cfg: Config, device: torch.device) -> Kernels:
    name = cfg.train.precision
    fault = fp8_fault(cfg.run, name, device)
    if not fault:
        from moefold.kernels.triton_fp8 import Fp8Products, Fp8Rows
        from moefold.kernels.triton_rope import turn

        rows = Fp8Rows(RECIPES[name].block)
        routing, note = _routing(cfg)
        note = f"train.precision={name!r}: on the matrix units{note}"
        return Kernels(rows, Fp8Products(rows), routing, rows, turn, note)
    simulated = SimulatedProducts(RECIPES[name])
    note = f"train.precision={name!r}: simulated, at the speed of float32 at best, as {fault}"
    return Kernels(SimulatedRows(simulated), simulated, note=note)


def fp8_fault(run: RunConfig, precision: str, device: torch.device) -> str:
    """Why products of few bits are simulated here; empty if the device computes them."""
    if precision != "fp8-blockwise":
        return "no kernel for it is built in"
    if run.kernels == "plain":
        return "run.kernels='plain'"
    if device.type != "cuda":
        return f"{device.type} has no matrix units for it"
    if torch.cuda.get_device_capability(device) < FP8_CAPABILITY:
        return "the GPU has no matrix units for it"
    return triton_fault(run, device.type)
